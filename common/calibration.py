"""How far probabilities can be trusted: measured, and put right.

`Meter` measures: Brier score (mean squared error; Brier 1950) and expected calibration error (ECE: mean gap
between predicted and realised rate over ten bins of equal width; Guo et al., arXiv 1706.04599). `Platt` puts
right: a slope and a shift of the log-odds (Platt 1999), fitted to outcomes that came after the predictions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 10
MEMORY = 0.9
"""What a wave keeps of the bins before it. One wave fills ten bins with too few outcomes to tell an error
from chance; ten waves do better, and a policy moves little over them."""
EDGE = 1e-6
"""Predictions keep this distance from 0 and 1, so that their log-odds are finite."""
PLATT_DISCOUNT = 0.7
"""The recalibration follows the policy faster than the predictor it corrects: it has two numbers to learn."""
PLATT_PRIOR = 5.0
"""Precision of the prior at the identity: about as much as twenty continuations say of the shift."""
SLOPES = (0.1, 10.0)
"""The order of predictions is never reversed, nor blown up."""


def log_odds(p: Floats) -> Floats:
    """log p / (1 − p), finite."""
    inside = np.clip(p, EDGE, 1 - EDGE)
    return np.asarray(np.log(inside / (1 - inside)))


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(−x)) without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def auc(predicted: Floats, outcomes: Floats) -> float | None:
    """Chance that a success was predicted higher than a failure, ties counted half; None without both.

    An outcome between 0 and 1 counts as that share of a success and the rest of a failure.
    """
    _, place = np.unique(predicted, return_inverse=True)
    wins = np.bincount(place, weights=outcomes)
    losses = np.bincount(place, weights=1.0 - outcomes)
    total = float(wins.sum() * losses.sum())
    below = np.cumsum(losses) - losses / 2
    return float((wins * below).sum()) / total if total > 0 else None


class Meter:
    """Brier score of the last wave, ECE of the last ten or so."""

    def __init__(self) -> None:
        self.brier: float | None = None
        self._bins = np.zeros((3, BINS))
        """Predictions, their sum and the sum of their outcomes, by bin, discounted."""

    def record(self, predicted: Floats, outcomes: Floats) -> None:
        """One wave. Nothing changes without predictions."""
        if not len(predicted):
            return
        self.brier = math.fsum((predicted - outcomes) ** 2) / len(predicted)
        bins = np.minimum((predicted * BINS).astype(np.int64), BINS - 1)
        self._bins *= MEMORY
        for row, weights in enumerate((np.ones_like(predicted), predicted, outcomes)):
            self._bins[row] += np.bincount(bins, weights=weights, minlength=BINS)

    def stats(self) -> dict[str, float]:
        """`brier` and `ece`, once there was something to measure."""
        if self.brier is None:
            return {}
        count, predicted, realised = self._bins
        return {"brier": self.brier, "ece": float(np.abs(predicted - realised).sum() / count.sum())}

    def to_state(self) -> dict[str, Any]:
        return {"brier": self.brier, "bins": self._bins.tolist()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Meter:
        meter = cls()
        meter.brier, meter._bins = state["brier"], np.array(state["bins"])
        return meter


class Platt:
    """logit p ← slope · logit p + shift, both learned online and pulled towards (1, 0)."""

    def __init__(self) -> None:
        self.slope, self.shift = 1.0, 0.0
        self._precision = PLATT_PRIOR * np.eye(2)

    def apply(self, p: Floats) -> Floats:
        return sigmoid(self.slope * log_odds(p) + self.shift)

    def fit(self, predicted: Floats, outcomes: Floats, weight: float) -> None:
        """Learn from predictions made before their outcomes were known; each counts `weight` continuations.

        The posterior of the waves before, tempered towards the identity, is the prior of this one.
        """
        keep, prior, identity = PLATT_DISCOUNT, PLATT_PRIOR * np.eye(2), np.array([1.0, 0.0])
        precision = keep * self._precision + (1 - keep) * prior
        known = keep * self._precision @ np.array([self.slope, self.shift]) + (1 - keep) * prior @ identity
        start = line = np.linalg.solve(precision, known)
        columns = np.stack([log_odds(predicted), np.ones_like(predicted)], axis=1)
        curvature = precision
        for _ in range(20):
            p = sigmoid(columns @ line)
            curvature = precision + weight * (columns.T * (p * (1 - p))) @ columns
            slope = weight * columns.T @ (outcomes - p) - precision @ (line - start)
            step = np.linalg.solve(curvature, slope)
            # A step in log-odds of at most one keeps Newton from leaping where the curve is flat.
            line = line + step / max(1.0, float(np.abs(step).max()))
            if float(np.abs(step).max()) < 1e-9:
                break
        self.slope, self.shift = float(np.clip(line[0], *SLOPES)), float(line[1])
        self._precision = curvature

    def to_state(self) -> list[float]:
        return [self.slope, self.shift, *self._precision.ravel().tolist()]

    @classmethod
    def from_state(cls, state: list[float]) -> Platt:
        platt = cls()
        platt.slope, platt.shift = state[0], state[1]
        platt._precision = np.array(state[2:]).reshape(2, 2)
        return platt
