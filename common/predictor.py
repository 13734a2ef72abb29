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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.calibration import Floats, Meter
from common.prefix import EMPTY, Prefix, Tally
from common.versions import Shelf

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
    """1 / terms of its continuation: they share one outcome, hence are one piece of evidence. It falls with
    the number of turns that were still to come, which depends on the outcome: what weighs a term by its own
    share is biased."""
    beside: Tally = EMPTY
    """Outcomes of continuations that started from the same anchor while as much was known, and come before
    this one. Unknown when the prediction was made: in learning they tell how far prefixes differ."""


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
        targets) and `ece` (expected calibration error over about ten updates) once there was one, and
        whatever else the predictor measures of itself."""

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
        self._discount = discount
        self._alpha = np.full(DEPTH_BUCKETS, PRIOR)
        self._beta = np.full(DEPTH_BUCKETS, PRIOR)
        self._meter = Meter()
        self._tables = Shelf(self._table())

    @property
    def brier(self) -> float | None:
        """Mean squared error of the predictions behind the last update's targets."""
        return self._meter.brier

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        return self._tables.get(version)[depth_bucket(prefix.depth)]

    def pin(self, version: int) -> None:
        self._tables.pin(version)

    def unpin(self, version: int) -> None:
        self._tables.unpin(version)

    def pinned(self) -> Counter[int]:
        return Counter(self._tables.pins)

    def kept(self) -> list[int]:
        """Versions that can still be predicted with."""
        return self._tables.kept()

    def update(self, targets: Sequence[Target]) -> int:
        depths = [depth_bucket(target.prefix.depth) for target in targets]
        outcomes = np.array([target.outcome for target in targets])
        wins = np.bincount(depths, weights=outcomes, minlength=DEPTH_BUCKETS) if targets else 0.0
        seen = np.bincount(depths, minlength=DEPTH_BUCKETS) if targets else 0.0
        keep = self._discount
        self._alpha = keep * self._alpha + (1 - keep) * PRIOR + wins
        self._beta = keep * self._beta + (1 - keep) * PRIOR + (seen - wins)
        self._meter.record(*predicted_and_outcome(targets))
        self.version = self._tables.put(self._table())
        return self.version

    def stats(self) -> dict[str, float]:
        return self._meter.stats()

    def to_state(self) -> dict[str, Any]:
        return {
            "kind": "history",
            "alpha": self._alpha.tolist(),
            "beta": self._beta.tolist(),
            "meter": self._meter.to_state(),
            "tables": self._tables.to_state(lambda table: [[p.mean, p.std] for p in table]),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        check_kind(state, "history")
        meter, alpha, beta = (
            Meter.from_state(state["meter"]),
            np.array(state["alpha"]),
            np.array(state["beta"]),
        )
        tables = Shelf.from_state(state["tables"], lambda table: tuple(Prediction(*pair) for pair in table))
        self._meter, self._alpha, self._beta, self._tables = meter, alpha, beta, tables
        self.version = tables.version

    def _table(self) -> tuple[Prediction, ...]:
        total = self._alpha + self._beta
        mean = self._alpha / total
        std = np.sqrt(mean * (1 - mean) / (total + 1))
        return tuple(Prediction(float(m), float(s)) for m, s in zip(mean, std, strict=True))


def predicted_and_outcome(targets: Sequence[Target]) -> tuple[Floats, Floats]:
    """Of the targets that something was predicted for."""
    pairs = [(target.predicted, target.outcome) for target in targets if target.predicted is not None]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def check_kind(state: dict[str, Any], kind: str) -> None:
    """Raise ValueError unless this is the state of a predictor of that kind."""
    if state["kind"] != kind:
        raise ValueError(f"expected the state of a predictor of kind {kind!r}, got {state['kind']!r}")
