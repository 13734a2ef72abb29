"""The success predictor: probability that a continuation from a prefix succeeds, with its uncertainty.

Shared by allocator (baselines, branch rules) and learner (reading values), hence numpy only. Trained online
with **one target per continuation**: its outcome, at its own anchor and at the nodes it sampled, never above
(later anchors were chosen by outcomes, and averages over realised children are biased once branching looks at
them). Updates are numbered: version v never changes, so that a lease may pin the version of its baselines.

`HistoryPredictor` looks only at the depth of a prefix: a discounted Beta posterior per depth bucket, after
MoPPS (arXiv 2507.04632, per-prompt Beta with discount λ), here per depth because prompts are not repeated.
"""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.prefix import Prefix

DEPTH_BUCKETS = 12
"""Depths 0, 1, 2-3, 4-7, … share a bucket; the last one holds 1024 turns and more."""
DISCOUNT = 0.9
"""λ: what a wave keeps of the evidence before it. The policy changes with each wave, so old outcomes fade;
0.9 remembers about ten waves, over which a policy of this size is near enough to itself."""
PRIOR = 1.0
"""α0 = β0 = 1: uniform, so that the first baseline is one half."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and standard deviation of the success probability, both in [0, 1]."""

    mean: float
    std: float


@dataclass(frozen=True, slots=True)
class Target:
    """One term of the loss: a prefix, what was predicted for it when it mattered, and what came of it."""

    prefix: Prefix
    """As it was when the prediction was made."""
    predicted: float | None
    outcome: float
    """In [0, 1]; 1 = success."""
    share: float = 1.0
    """1 / terms of its continuation: they share one outcome, hence are one piece of evidence."""


class Predictor(abc.ABC):
    """Maps a prefix to a probability of success under a numbered version of its parameters."""

    version: int
    """The newest version; grows by one with each `update`."""

    @abc.abstractmethod
    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        """Prediction under `version` (None = newest). Raises KeyError for a version no longer kept."""

    @abc.abstractmethod
    def pin(self, version: int) -> None:
        """Keep `version` until as many `unpin` calls: a live lease computes baselines with it."""

    @abc.abstractmethod
    def unpin(self, version: int) -> None:
        """Undo one `pin`."""

    @abc.abstractmethod
    def update(self, targets: Sequence[Target]) -> int:
        """Learn from the targets of one wave, in the order given; returns the new version."""

    @abc.abstractmethod
    def pinned(self) -> Counter[int]:
        """How many pins each version has, for audits."""

    @abc.abstractmethod
    def stats(self) -> dict[str, float]:
        """Flat numbers for metrics: `brier` (mean squared error of the predictions behind the last update's
        targets) once there was one, and whatever else the predictor measures of itself."""

    @abc.abstractmethod
    def to_state(self) -> dict[str, Any]:
        """All of it as plain values (msgpack-able), pins included."""

    @abc.abstractmethod
    def from_state(self, state: dict[str, Any]) -> None:
        """Become what `to_state` described. Raises KeyError or ValueError for a state of another kind."""


def depth_bucket(depth: int) -> int:
    """0, 1, 2-3, 4-7, …: depths are few near the root, where most branching happens."""
    return min(depth.bit_length(), DEPTH_BUCKETS - 1)


class HistoryPredictor(Predictor):
    """Discounted Beta posterior per depth bucket; the features are not looked at."""

    def __init__(self, discount: float = DISCOUNT) -> None:
        self.version = 0
        self.brier: float | None = None
        self._discount = discount
        self._alpha = np.full(DEPTH_BUCKETS, PRIOR)
        self._beta = np.full(DEPTH_BUCKETS, PRIOR)
        self._pins: Counter[int] = Counter()
        self._tables = {0: self._table()}

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        return self._tables[self.version if version is None else version][depth_bucket(prefix.depth)]

    def pin(self, version: int) -> None:
        if version not in self._tables:
            raise KeyError(f"predictor version {version} is no longer kept (newest is {self.version})")
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if self._pins[version] <= 0:
            del self._pins[version]
            if version != self.version:
                self._tables.pop(version, None)

    def pinned(self) -> Counter[int]:
        return Counter(self._pins)

    def kept(self) -> list[int]:
        """Versions that can still be predicted with."""
        return sorted(self._tables)

    def update(self, targets: Sequence[Target]) -> int:
        depths = [depth_bucket(target.prefix.depth) for target in targets]
        outcomes = np.array([target.outcome for target in targets])
        wins = np.bincount(depths, weights=outcomes, minlength=DEPTH_BUCKETS) if targets else 0.0
        seen = np.bincount(depths, minlength=DEPTH_BUCKETS) if targets else 0.0
        keep = self._discount
        self._alpha = keep * self._alpha + (1 - keep) * PRIOR + wins
        self._beta = keep * self._beta + (1 - keep) * PRIOR + (seen - wins)
        errors = [(t.predicted - t.outcome) ** 2 for t in targets if t.predicted is not None]
        if errors:
            self.brier = math.fsum(errors) / len(errors)
        old = self.version
        self.version += 1
        self._tables[self.version] = self._table()
        if not self._pins[old]:
            del self._pins[old]
            del self._tables[old]
        return self.version

    def stats(self) -> dict[str, float]:
        return {} if self.brier is None else {"brier": self.brier}

    def to_state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "brier": self.brier,
            "alpha": self._alpha.tolist(),
            "beta": self._beta.tolist(),
            "pins": sorted(self._pins.items()),
            "tables": [[v, [[p.mean, p.std] for p in table]] for v, table in self._tables.items()],
        }

    def from_state(self, state: dict[str, Any]) -> None:
        self.version, self.brier = state["version"], state["brier"]
        self._alpha, self._beta = np.array(state["alpha"]), np.array(state["beta"])
        self._pins = Counter(dict(state["pins"]))
        self._tables = {v: tuple(Prediction(*pair) for pair in table) for v, table in state["tables"]}

    def _table(self) -> tuple[Prediction, ...]:
        total = self._alpha + self._beta
        mean = self._alpha / total
        std = np.sqrt(mean * (1 - mean) / (total + 1))
        return tuple(Prediction(float(m), float(s)) for m, s in zip(mean, std, strict=True))
