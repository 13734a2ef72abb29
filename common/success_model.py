"""The success model under one version of its parameters: what it says of a prefix.

    x = columns of the prefix (`predictor_inputs`)          m = σ(θ·x)                what prefixes like it do
    κ = exp(ψ0 + ψ1 log(1 + depth))                         V ~ Beta(κ m, κ (1 − m))  how much they differ
    w successes in n outcomes at the prefix itself          p = (κ m + w) / (κ + n)

The true chance V of a prefix is known neither from its columns alone nor from its few outcomes alone.
Logistic regression gives a mean; a Beta distribution around it, whose concentration κ is learned too, says
how far prefixes with the same columns lie apart, and takes in the outcomes at the prefix by conjugacy: the
first ones move a prediction a lot where prefixes differ a lot, and many of them overrule the columns. Hence
the standard deviation is that of V, not of an average: it falls with outcomes at the prefix, and not to zero
with evidence from elsewhere.

θ is uncertain as well (Laplace: normal around its most likely value). The mean and variance of m under it
are those of Daunizeau, arXiv 1703.00091 (after MacKay 1992). With s = 1/√(1 + 0.368 xᵀ Cov(θ) x),

    E m = σ(s θ·x)      Var m = E m (1 − E m) (1 − s)      D = (κ / (κ + n))² Var m
    Var V = D + (p (1 − p) − D) / (κ + n + 1)

Last comes the recalibration (`calibration.Platt`): it moves the mean, and leaves as many outcomes as before
behind it, so that the standard deviation goes with √(p (1 − p)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.calibration import EDGE, sigmoid
from common.predictor import Prediction
from common.predictor_inputs import (
    COLUMNS,
    DESCRIBED,
    FIXED,
    ODDS,
    SEEN,
    Rows,
    Scale,
    array,
    cut,
    elsewhere,
    fixed_columns,
    plain,
    vector,
)
from common.prefix import Prefix

Floats = NDArray[np.float64]

SQUASH = 0.368
"""Daunizeau's constant: means within 0.007 of the exact integral, standard deviations within 0.035, for
|θ·x| ≤ 4 and v ≤ 10."""
LOG_CONCENTRATION = (-4.0, 7.0)
"""κ between 0.02 (all prefixes certain, one way or the other) and 1,100 (all alike)."""
REMEMBERED = 1 << 16
"""Prefixes whose fixed part is kept, per version: a rule asks for the same ones after each outcome."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """What does not change about a prefix while its tree grows."""

    logit: float
    variance: float
    lean_odds: float
    """Covariance of the fixed part with the two columns of the tree's outcomes."""
    lean_seen: float
    concentration: float


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Frozen parameters. D = COLUMNS + F."""

    weights: Floats
    """θ `[D]`."""
    covariance: Floats
    """Of θ, `[D, D]`."""
    concentration: tuple[float, float]
    """ψ."""
    scale: Scale
    slope: float
    shift: float
    _of_tree: tuple[float, float, float, float, float] = field(init=False, repr=False)
    """Weights of the two columns of the tree's outcomes, their variances, and their covariance."""
    _centre: Floats = field(init=False, repr=False)
    _spread: Floats = field(init=False, repr=False)
    _known: dict[tuple[object, ...], Fixed] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        theta, covariance = self.weights.tolist(), self.covariance
        variances = float(covariance[ODDS, ODDS]), float(covariance[SEEN, SEEN])
        both = float(covariance[ODDS, SEEN])
        object.__setattr__(self, "_centre", self.scale.mean)
        object.__setattr__(self, "_spread", self.scale.std)
        object.__setattr__(self, "_of_tree", (theta[ODDS], theta[SEEN], *variances, both))

    def predict(self, prefix: Prefix) -> Prediction:
        """Mean and standard deviation of the chance V that a fresh continuation succeeds."""
        key = (prefix.depth, prefix.process_score, prefix.entropy, prefix.tokens, prefix.features)
        fixed = self._known.get(key)
        if fixed is None:
            fixed = self._fixed(prefix)
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            self._known[key] = fixed
        odds, seen = elsewhere(prefix)
        w_odds, w_seen, var_odds, var_seen, both = self._of_tree
        logit = fixed.logit + odds * w_odds + seen * w_seen
        variance = fixed.variance + 2.0 * (odds * fixed.lean_odds + seen * fixed.lean_seen)
        variance += odds * odds * var_odds + 2.0 * odds * seen * both + seen * seen * var_seen
        return self._prediction(logit, max(0.0, variance), fixed.concentration, prefix)

    def _fixed(self, prefix: Prefix) -> Fixed:
        x = np.zeros(len(self.weights))
        x[:FIXED] = fixed_columns(prefix)
        values = vector(prefix.features, len(x) - COLUMNS)
        if values is not None:
            x[DESCRIBED] = 1.0
            x[COLUMNS:] = cut((values - self._centre) / self._spread)
        lean = self.covariance @ x
        reach = math.log1p(prefix.depth)
        return Fixed(
            float(self.weights @ x), float(lean @ x), float(lean[ODDS]), float(lean[SEEN]), self._kappa(reach)
        )

    def _kappa(self, reach: float) -> float:
        low, high = LOG_CONCENTRATION
        return math.exp(min(high, max(low, self.concentration[0] + self.concentration[1] * reach)))

    def _prediction(self, logit: float, variance: float, kappa: float, prefix: Prefix) -> Prediction:
        squash = 1.0 / math.sqrt(1.0 + SQUASH * variance)
        m = 0.5 * (1.0 + math.tanh(0.5 * squash * logit))
        trials, wins = prefix.below.trials, prefix.below.wins
        share = kappa / (kappa + trials)
        p = min(1 - EDGE, max(EDGE, (kappa * m + wins) / (kappa + trials)))
        doubt = share * share * m * (1.0 - m) * (1.0 - squash)
        spread = max(0.0, p * (1.0 - p) - doubt) / (kappa + trials + 1.0) + doubt
        mean = 0.5 * (1.0 + math.tanh(0.5 * (self.slope * math.log(p / (1.0 - p)) + self.shift)))
        return Prediction(mean, math.sqrt(spread * mean * (1.0 - mean) / (p * (1.0 - p))))

    def means(self, rows: Rows) -> Floats:
        """`[N]` predictions before their recalibration."""
        design = rows.design(self.scale)
        squash = 1.0 / np.sqrt(1.0 + SQUASH * np.einsum("ij,ij->i", design @ self.covariance, design))
        m = sigmoid(squash * (design @ self.weights))
        kappa = np.array([self._kappa(reach) for reach in rows.reach.tolist()])
        return np.asarray(np.clip((kappa * m + rows.wins) / (kappa + rows.trials), EDGE, 1 - EDGE))

    def to_state(self) -> dict[str, Any]:
        """Plain values; arrays as the bytes of little-endian float64."""
        return {
            "weights": plain(self.weights),
            "covariance": plain(self.covariance),
            "concentration": list(self.concentration),
            "scale": self.scale.to_state(),
            "platt": [self.slope, self.shift],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Model:
        """Raises KeyError or ValueError for a state of another kind."""
        weights = array(state["weights"])
        covariance = array(state["covariance"]).reshape(len(weights), len(weights))
        first, second = state["concentration"]
        return cls(weights, covariance, (first, second), Scale.from_state(state["scale"]), *state["platt"])
