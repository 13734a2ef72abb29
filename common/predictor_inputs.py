"""What the shared predictor sees of a prefix, as numbers: a row of columns, and the outcomes at the prefix.

    bias │ deeper  log depth  its square │ scored  score  its square  score × log depth │ sampled  entropy
    │ log tokens │ described │ log-odds and log number of outcomes elsewhere in the tree │ engine features

Absent is not zero: what may be missing has a column that says whether it is there, and its values are zero
only where that column is. Outcomes at the prefix itself are not columns: they are evidence of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.prefix import Prefix

Floats = NDArray[np.float64]

COLUMNS = 14
"""Columns before the engine's features."""
DESCRIBED = 11
"""Whether the engine's features are there."""
ODDS, SEEN = 12, 13
"""Log-odds and log number of the outcomes elsewhere in the tree: what changes while it grows."""
FIXED = 12
"""Columns before those two."""
MAX_WIDTH = 64
"""Most engine features used. They are random projections, so that the first ones are as good as any others;
each is one more weight to learn."""
FEATURE_LIMIT = 1e6
"""A vector longer than this, or not finite, is taken as missing: it would drown the others."""
FAR = 5.0
"""Standardised features are cut here."""
MOST_ENTROPY = 10.0
"""Nats, a uniform draw from 22,000 tokens."""


def fixed_columns(prefix: Prefix) -> list[float]:
    """The columns that do not change while the tree grows, without the engine's features."""
    reach = math.log1p(prefix.depth)
    score, entropy = prefix.process_score, prefix.entropy
    height = 0.0 if score is None else 4.0 * min(1.0, max(0.0, score)) - 2.0
    surprise = 0.0 if entropy is None else min(MOST_ENTROPY, max(0.0, entropy))
    return [
        1.0,
        float(prefix.depth > 0), reach, reach * reach / 4,
        float(score is not None), height, height * height, height * reach,
        float(entropy is not None), surprise,
        math.log1p(prefix.tokens),
        0.0,
    ]  # fmt: skip


def elsewhere(prefix: Prefix) -> tuple[float, float]:
    """Log-odds (a success and a failure added) and log number of the tree's outcomes not at the prefix."""
    trials = max(0, prefix.tree.trials - prefix.below.trials)
    wins = min(float(trials), max(0.0, prefix.tree.wins - prefix.below.wins))
    return math.log((wins + 1.0) / (trials - wins + 1.0)), math.log1p(trials)


def vector(features: bytes | None, width: int) -> Floats | None:
    """The first `width` of the engine's features; None where they are missing or cannot be used."""
    if features is None or width == 0 or len(features) < 4 * width:
        return None
    values = np.frombuffer(features, dtype="<f4", count=width).astype(np.float64)
    # Not `length > limit`: a value that is not a number must fail, too.
    return values if float(values @ values) <= FEATURE_LIMIT**2 else None


def width_of(prefixes: Sequence[Prefix]) -> int:
    """Features that most vectors among the prefixes offer; 0 without any."""
    found = Counter(len(prefix.features) // 4 for prefix in prefixes if prefix.features is not None)
    return min(MAX_WIDTH, max(found, key=lambda width: (found[width], width), default=0))


@dataclass(frozen=True, slots=True)
class Rows:
    """Prefixes as numbers."""

    columns: Floats
    """`[N, COLUMNS]`."""
    features: Floats
    """`[N, F]`, raw; zero where missing, as the column `DESCRIBED` says."""
    wins: Floats
    """`[N]`: outcomes at the prefix, and how many."""
    trials: Floats
    reach: Floats
    """`[N]`: log(1 + depth)."""

    def design(self, scale: Scale) -> Floats:
        """`[N, COLUMNS + F]` with standardised features."""
        there = self.columns[:, DESCRIBED, None]
        return np.hstack([self.columns, scale.standardised(self.features) * there])


def encode(prefixes: Sequence[Prefix], width: int) -> Rows:
    """The prefixes with `width` engine features each."""
    columns = np.zeros((len(prefixes), COLUMNS))
    features = np.zeros((len(prefixes), width))
    for row, prefix in enumerate(prefixes):
        columns[row, :FIXED] = fixed_columns(prefix)
        columns[row, FIXED:] = elsewhere(prefix)
        values = vector(prefix.features, width)
        if values is not None:
            columns[row, DESCRIBED] = 1.0
            features[row] = values
    at = np.array([(p.below.wins, p.below.trials) for p in prefixes], dtype=np.float64).reshape(-1, 2)
    return Rows(columns, features, at[:, 0], at[:, 1], columns[:, 2].copy())


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of the engine's features, from discounted sums. Shapes `[F]`."""

    count: float
    total: Floats
    squares: Floats

    @classmethod
    def unknown(cls, width: int) -> Scale:
        return cls(0.0, np.zeros(width), np.zeros(width))

    @property
    def mean(self) -> Floats:
        return self.total / self.count if self.count else self.total

    @property
    def std(self) -> Floats:
        """Above 0: a feature that never varies says nothing, and must not be blown up."""
        if self.count == 0:
            return np.ones_like(self.total)
        mean = self.mean
        spread = np.sqrt(np.maximum(0.0, self.squares / self.count - mean**2))
        return np.asarray(np.maximum(spread, 1e-3 * np.abs(mean) + 1e-6))

    def after(self, features: Floats, keep: float) -> Scale:
        """The scale once these vectors, `[N, F]`, are known too."""
        if not len(features):
            return self
        return Scale(
            keep * self.count + len(features),
            keep * self.total + features.sum(0),
            keep * self.squares + (features**2).sum(0),
        )

    def standardised(self, features: Floats) -> Floats:
        return cut((features - self.mean) / self.std)

    def to_state(self) -> dict[str, Any]:
        return {"count": self.count, "total": plain(self.total), "squares": plain(self.squares)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Scale:
        return cls(state["count"], array(state["total"]), array(state["squares"]))


def cut(features: Floats) -> Floats:
    """Standardised features within bounds; in place."""
    return np.maximum(np.minimum(features, FAR, out=features), -FAR, out=features)


def plain(values: Floats) -> bytes:
    """An array as the bytes of its little-endian float64, row by row: exact, and small on disk."""
    return values.astype("<f8").tobytes()


def array(values: bytes) -> Floats:
    """What `plain` was made of, without its shape. Raises ValueError for bytes that are no such array."""
    return np.frombuffer(values, dtype="<f8").astype(np.float64)
