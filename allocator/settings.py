"""What the core needs of the configuration, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from common.config import Config, agreed_settings, config_hash
from common.release import code_id
from common.settings import settings, to_text

GC_THRESHOLD = (100_000, 50, 1_000)
"""For `gc.set_threshold`: a run keeps hundreds of thousands of small objects, and with Python's defaults a
third of the time goes into looking at all of them again and again. Measured with
`benchmarks/allocator_fleet.py`."""

DECISIVE = (
    "seed", "deterministic", "env.", "engine.", "learner.steps", "learner.batch_trees",
    "learner.max_policy_lag", "allocator.", "cluster.heartbeat_s", "cluster.dead_after_s",
    "cluster.connect_timeout_s",
)  # fmt: skip
"""Keys, and beginnings of keys, that the core's decisions depend on."""
NOT_DECISIVE = ("allocator.journal_flush_ms",)
CHANGEABLE = {
    "learner.steps": "steps", "cluster.heartbeat_s": "heartbeat_s", "cluster.dead_after_s": "dead_after_s",
    "cluster.connect_timeout_s": "connect_timeout_s",
}  # fmt: skip
"""Decisive keys, and fields of `Settings`, that a process may change when it takes a run up. Each process
writes down its own, and a replay decides by those of the process whose records it has reached."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Values fixed for a run. Durations in seconds, budgets in trees."""

    run: str = "run"
    seed: int = 0
    env: str = "frozenlake"
    split: str = "train"
    steps: int = 60
    batch_trees: int = 32
    max_policy_lag: int = 2
    """K, in weight versions."""
    max_score_staleness: int = 4
    """D, in events a score has not seen."""
    lease_deadline_s: float = 30.0
    max_attempts: int = 3
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    connect_timeout_s: float = 60.0
    deterministic: bool = False
    agreed: dict[str, str] = field(default_factory=dict)
    """Settings that every peer must share, compared key by key at `Hello`."""
    config_hash: str = ""
    decisive: dict[str, str] = field(default_factory=dict)
    """All that decisions depend on, as text by key: journalled, so that a replay knows what it replays."""

    def changed(self, decisive: Mapping[str, str]) -> Settings:
        """These settings with the values of `CHANGEABLE` that `decisive` has. Raises `ValueError` for text
        that is no number."""
        values = {
            name: type(getattr(self, name))(decisive[key])
            for key, name in CHANGEABLE.items()
            if key in decisive
        }
        texts = {key: decisive[key] for key in CHANGEABLE if key in decisive}
        return dataclasses.replace(self, **values, decisive={**self.decisive, **texts})

    @property
    def trees(self) -> int:
        """Trees the run trains on."""
        return self.steps * self.batch_trees

    @classmethod
    def from_config(cls, config: Config, run: str) -> Settings:
        return cls(
            run=run,
            seed=config.seed,
            env=config.env.name,
            steps=config.learner.steps,
            batch_trees=config.learner.batch_trees,
            max_policy_lag=config.learner.max_policy_lag,
            max_score_staleness=config.allocator.max_score_staleness,
            lease_deadline_s=config.allocator.lease_deadline_s,
            max_attempts=config.allocator.max_attempts,
            heartbeat_s=config.cluster.heartbeat_s,
            dead_after_s=config.cluster.dead_after_s,
            connect_timeout_s=config.cluster.connect_timeout_s,
            deterministic=config.deterministic,
            agreed=agreed_settings(config),
            config_hash=config_hash(config),
            decisive=decisive_settings(config),
        )


def decisive_settings(config: Config) -> dict[str, str]:
    """The settings that the core's decisions depend on, as text by key."""
    return {
        key: to_text(value)
        for key, _, value in settings(config)
        if key.startswith(DECISIVE) and key not in NOT_DECISIVE
    }


def code_of_decisions() -> str:
    """Names the code that decides: another one may decide otherwise."""
    return code_id("allocator", "common")
