"""How the success model learns: a normal posterior over its parameters, carried from wave to wave.

    posterior of wave t−1 ──forget: tempered towards the prior──▶ prior of wave t
                          ──learn: Newton to its mode, curvature there──▶ posterior of wave t

Forgetting is that of the Beta model after MoPPS (arXiv 2507.04632), in natural parameters: with λ = 0.9 the
evidence of about ten waves counts, so that the posterior follows the policy. The loss is the log-likelihood
of the outcomes under p = (κ m + w) / (κ + n), see `success_model`.

**What a term weighs.** The terms of a continuation share one outcome. Each of them weighs the mean of `share`
over the wave, so that on average a continuation counts once. Weighing each term by its own share would count
it once exactly, and be wrong: the share falls with the number of turns still to come, which depends on the
outcome (where success ends an episode early, its terms would weigh more than those of failures). Measured on
FrozenLake, that doubles the calibration error; and on martingale populations, where the true chances are
known, their z-scores spread by 0.8 to 1.5 with the mean share and by up to 1.9 where each term weighs one.

**What identifies κ.** Outcomes predicted in the light of earlier ones at the same prefix. Continuations that
were granted together are taken one after the other (`Target.beside`): by exchangeability the product of their
conditional probabilities is their joint probability, in whichever order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.calibration import EDGE, Platt, sigmoid
from common.predictor_inputs import COLUMNS, DESCRIBED, Rows, Scale, array, plain
from common.success_model import LOG_CONCENTRATION, Model

Floats = NDArray[np.float64]

PSI = 2
"""Parameters of κ; they come first."""
FEATURES = PSI + COLUMNS
"""Where the weights of the engine's features begin: last, since their number is known only once one came."""
CONCENTRATION = math.log(3.0)
"""Before there is evidence: prefixes with the same columns differ about as much as Beta(1.5, 1.5)."""
PSI_STD = (1.5, 0.5)
BIAS_STD = 1.5
FLAG_STD = 0.5
"""Of the columns that say whether something is there: bias enough of their own."""
FLAGS = (1, 4, 8, DESCRIBED)
FEATURES_STD = 1.5
"""Of what all engine features together add to the log-odds, whatever their number."""
STEPS = 50
"""Most Newton steps of a wave; five to ten are usual."""
CONVERGED = 1e-10
"""Twice what another step would gain in log-likelihood."""


def prior(width: int, strength: float) -> tuple[Floats, Floats]:
    """Mean and precision (its diagonal) of the prior, `[P]` each; the standard deviations of all weights but
    the bias scale with `strength`."""
    std = np.concatenate([np.full(FEATURES, strength), np.full(width, strength * FEATURES_STD)])
    std[FEATURES:] /= math.sqrt(max(1, width))
    std[:PSI] = PSI_STD
    std[PSI] = BIAS_STD
    std[[PSI + flag for flag in FLAGS]] = strength * FLAG_STD
    mean = np.zeros(FEATURES + width)
    mean[0] = CONCENTRATION
    return mean, 1.0 / std**2


class Posterior:
    """Normal over (ψ, θ): mean `[P]`, precision `[P, P]`, P = 2 + COLUMNS + F."""

    def __init__(self, discount: float, strength: float) -> None:
        self.discount = discount
        self.strength = strength
        self.scale = Scale.unknown(0)
        self.mean, diagonal = prior(0, strength)
        self.precision = np.diag(diagonal)

    @property
    def width(self) -> int:
        """Engine features known of."""
        return len(self.mean) - FEATURES

    def freeze(self, platt: Platt) -> Model:
        """The parameters as they are now, with a recalibration."""
        covariance = np.asarray(np.linalg.inv(self.precision)[PSI:, PSI:], dtype=np.float64)
        kappa = float(self.mean[0]), float(self.mean[1])
        return Model(self.mean[PSI:].copy(), covariance, kappa, self.scale, platt.slope, platt.shift)

    def widen(self, width: int) -> bool:
        """Weights for engine features, as the prior has them. False unless these are the first seen."""
        if self.width or not width:
            return False
        _, diagonal = prior(width, self.strength)
        precision = np.diag(diagonal)
        precision[:FEATURES, :FEATURES] = self.precision
        self.mean, self.precision = np.concatenate([self.mean, np.zeros(width)]), precision
        self.scale = Scale.unknown(width)
        return True

    def rescale(self, features: Floats) -> None:
        """Let the standardisation of the features follow them; what the model says of a prefix stays.

        With x = (u − μ) / s and x' = (u − μ') / s':  θ' = θ s' / s, and the weight of the column that says
        whether there are features takes up Σ θ (μ' − μ) / s.
        """
        old, self.scale = self.scale, self.scale.after(features, self.discount)
        if not self.width or not old.count:
            return
        back, flag = np.eye(len(self.mean)), PSI + DESCRIBED
        shift = (self.scale.mean - old.mean) / self.scale.std
        back[range(FEATURES, len(back)), range(FEATURES, len(back))] = old.std / self.scale.std
        back[flag, FEATURES:] = -shift
        self.mean[flag] += float(shift @ (self.mean[FEATURES:] * (self.scale.std / old.std)))
        self.mean[FEATURES:] *= self.scale.std / old.std
        self.precision = back.T @ self.precision @ back

    def forget(self) -> None:
        """Temper towards the prior: precision and precision · mean move there by 1 − discount."""
        keep = self.discount
        mean, diagonal = prior(self.width, self.strength)
        precision = keep * self.precision + np.diag((1 - keep) * diagonal)
        known = keep * (self.precision @ self.mean) + (1 - keep) * diagonal * mean
        self.mean = np.asarray(np.linalg.solve(precision, known), dtype=np.float64)
        self.precision = precision

    def learn(self, rows: Rows, outcomes: Floats, weight: float) -> int:
        """Add the evidence of a wave; each row weighs `weight` continuations. Returns the steps it took.

        Fisher scoring with halved steps: the loss never rises.
        """
        task = Fit(rows, rows.design(self.scale), outcomes, weight, self.mean, self.precision)
        at, loss = self.mean, task.loss(self.mean)
        for taken in range(STEPS):
            slope, curvature = task.slope_and_curvature(at)
            step = np.linalg.solve(curvature, slope)
            gain = float(slope @ step)
            length = 1.0
            while gain > CONVERGED and (new := task.loss(at + length * step)) > loss and length > 1e-6:
                length /= 2
            if gain <= CONVERGED or length <= 1e-6:
                self.mean, self.precision = at, curvature
                return taken
            at, loss = at + length * step, new
        self.mean, self.precision = at, task.slope_and_curvature(at)[1]
        return STEPS

    def to_state(self) -> dict[str, Any]:
        return {"mean": plain(self.mean), "precision": plain(self.precision), "scale": self.scale.to_state()}

    def become(self, state: dict[str, Any]) -> None:
        """What `to_state` described. Raises KeyError or ValueError for a state of another kind."""
        mean = array(state["mean"])
        precision, scale = array(state["precision"]).reshape(len(mean), -1), Scale.from_state(state["scale"])
        self.mean, self.precision, self.scale = mean, precision, scale


class Fit:
    """The loss of a wave, z = (ψ, θ): ½ (z − z0)ᵀ P (z − z0) − weight · Σ (y log p + (1 − y) log(1 − p))."""

    def __init__(
        self, rows: Rows, design: Floats, outcomes: Floats, weight: float, start: Floats, precision: Floats
    ) -> None:
        self.rows, self.design, self.outcomes, self.weight = rows, design, outcomes, weight
        self.start, self.precision = start, precision
        self.psi = np.stack([np.ones_like(rows.reach), rows.reach], axis=1)

    def loss(self, at: Floats) -> float:
        p = self._response(at)[0]
        y, away = self.outcomes, at - self.start
        surprise = float((y * np.log(p) + (1 - y) * np.log(1 - p)).sum())
        return float(away @ self.precision @ away) / 2 - self.weight * surprise

    def slope_and_curvature(self, at: Floats) -> tuple[Floats, Floats]:
        """Minus the gradient, and the Fisher information with the prior's precision."""
        p, m, kappa = self._response(at)
        total = kappa + self.rows.trials
        by_theta = (kappa / total * m * (1 - m))[:, None] * self.design
        by_psi = (kappa * (self.rows.trials * m - self.rows.wins) / total**2)[:, None] * self.psi
        jacobian = np.hstack([by_psi, by_theta])
        per_row = self.weight / (p * (1 - p))
        slope = jacobian.T @ (per_row * (self.outcomes - p)) - self.precision @ (at - self.start)
        return slope, (jacobian.T * per_row) @ jacobian + self.precision

    def _response(self, at: Floats) -> tuple[Floats, Floats, Floats]:
        """p, m and κ of each row."""
        kappa = np.exp(np.clip(self.psi @ at[:PSI], *LOG_CONCENTRATION))
        m = sigmoid(self.design @ at[PSI:])
        p = (kappa * m + self.rows.wins) / (kappa + self.rows.trials)
        return np.clip(p, EDGE, 1 - EDGE), m, kappa
