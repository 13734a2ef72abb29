"""Which settings may differ when a run goes on, and in words those that may not.

What a run learns depends on most of its settings: half a run under one credit and half under another is
neither. Free are places, numbers of processes, waits, how much is kept and recorded, how the same update is
computed (by how many, on what, in which portions: rounding apart, the weights are the same), stages that are
over or beside the training, and how long it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from common.config import Config
from common.errors import ConfigError
from common.settings import convert, settings, to_text

FREE = (
    "role", "run", "resume", "runs_dir", "actor.", "audit.", "replay.", "eval.", "warmstart.",
    "cluster.", "security.", "tracking.", "learner.checkpoint_every", "learner.keep_checkpoints",
    "learner.keep_versions", "learner.micro_batch_tokens", "learner.backend.collective_timeout_s",
    "learner.backend.device", "learner.backend.gradient_checkpointing", "allocator.journal_flush_ms",
)  # fmt: skip
"""Keys, and beginnings of keys, that may change. `model.path` is none of them: a run goes on from its
checkpoint, but may be held near to the weights that it started from (`learner.reference`)."""
FREE_WITH_TORCH = ("learner.backend.processes",)
"""Such as may change with the `torch` backend, whose first rank holds the whole optimiser. `deepspeed` saves
a part for each rank, which fits that number of ranks only."""
GROWING = ("learner.steps",)
"""Such as may only grow."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that must not change, as text."""

    key: str
    was: str
    now: str

    def __str__(self) -> str:
        rule = " or more" if self.key in GROWING else ""
        return f"{self.key} must be {self.was}{rule}, got {self.now}"


def differences(recorded: Mapping[str, Any], config: Config) -> list[Difference]:
    """Settings of `config` that are not those that a run was begun with, and must be.

    Args:
        recorded: values by dotted key, as `config.yaml` has them. A key that one side lacks is passed over:
            another release wrote it.
        config: with which the run is to go on.
    """
    found = []
    free = FREE + (FREE_WITH_TORCH if config.learner.backend.name == "torch" else ())
    for key, kind, value in settings(config):
        if key not in recorded or key.startswith(free):
            continue
        was = convert(key, kind, recorded[key])
        if was != value and not (key in GROWING and value > was):
            found.append(Difference(key, to_text(was) or "''", to_text(value) or "''"))
    return found


def refuse(what: str, found: Iterable[Difference]) -> None:
    """Raise `ConfigError` with all of them, if there are any. `what` was made with other settings."""
    sentences = [str(difference) for difference in found]
    if sentences:
        raise ConfigError(
            f"{what} was made with other settings: {'; '.join(sentences)}. Leave them as they were, or start "
            "a new run"
        )


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key of a configuration as plain maps."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return found
