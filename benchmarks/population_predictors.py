"""Success predictors that are told the hidden value of a prefix, exactly, blurred, or not at all.

    Blind      one half, always
    Sighted    the exact posterior mean of Φ(z), given y = z + noise: an oracle where there is no noise
    Noise      what an oracle would say of an unrelated prefix of that depth: the null control

They learn nothing. `Sighted` is calibrated: over prefixes that nobody selected, z is normal
(`Population.law`) and so is the posterior, N(m, v); E[Φ(z)] = Φ(h) with h = m / √(1 + v), and E[Φ(z)²] is the
orthant of two normals of correlation v / (1 + v), by Owen's T. Its noise has the shares of the population's
own views: one part for the whole tree of a prompt, one for each node.
"""

from __future__ import annotations

import abc
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.population import Population, State, normal_cdf
from common.predictor import Prediction, Predictor, Target
from common.prefix import Prefix

Hidden = Mapping[bytes, State]
"""States by their features."""
_LEGENDRE = (
    (-0.9602898564975363, 0.1012285362903763), (-0.7966664774136267, 0.2223810344533745),
    (-0.5255324099163290, 0.3137066458778873), (-0.1834346424956498, 0.3626837833783620),
    (0.1834346424956498, 0.3626837833783620), (0.5255324099163290, 0.3137066458778873),
    (0.7966664774136267, 0.2223810344533745), (0.9602898564975363, 0.1012285362903763),
)  # fmt: skip
"""Nodes and weights of the eight-point Gauss-Legendre rule on [−1, 1]."""
_NOISE, _BLUR = 0x2545F4914F6C, 0x9E3779B97F4A
"""Part the draws of these predictors from each other and from the population's."""


class Unlearned(Predictor):
    """A predictor whose versions are all alike."""

    def __init__(self) -> None:
        self.version = 0
        self._pins: Counter[int] = Counter()

    @abc.abstractmethod
    def see(self, prefix: Prefix) -> Prediction:
        """What it says of a prefix, whatever the version."""

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        return self.see(prefix)

    def pin(self, version: int) -> None:
        self._pins[version] += 1

    def unpin(self, version: int) -> None:
        self._pins[version] -= 1
        if self._pins[version] <= 0:
            del self._pins[version]

    def update(self, targets: Sequence[Target]) -> int:
        self.version += 1
        return self.version

    def pinned(self) -> Counter[int]:
        return Counter(self._pins)

    def stats(self) -> dict[str, float]:
        return {}

    def to_state(self) -> dict[str, Any]:
        return {"version": self.version, "pins": sorted(self._pins.items())}

    def from_state(self, state: dict[str, Any]) -> None:
        self.version, self._pins = state["version"], Counter(dict(state["pins"]))


class Blind(Unlearned):
    """Knows nothing: uniform on [0, 1]."""

    def see(self, prefix: Prefix) -> Prediction:
        return Prediction(0.5, math.sqrt(1 / 12))


class Sighted(Unlearned):
    """Sees z through normal noise of standard deviation `blur`."""

    def __init__(self, population: Population, hidden: Hidden, blur: float) -> None:
        super().__init__()
        self.population, self.hidden = population, hidden
        shared, own = population.prompt_noise**2, population.node_noise**2
        self._of_prompt = blur * math.sqrt(shared / (shared + own))
        self._of_node = blur * math.sqrt(own / (shared + own))
        laws = [population.law(depth) for depth in range(population.max_turns)]
        self._laws = [(mean, *_weights(spread, blur)) for mean, spread in laws]

    def see(self, prefix: Prefix) -> Prediction:
        assert prefix.features is not None
        state = self.hidden[prefix.features]
        off = self._of_prompt * state.blur[-1]
        if self._of_node:
            off += self._of_node * random.Random(state.key ^ _BLUR).gauss(0, 1)
        mean, weight, variance = self._laws[state.depth]
        return _posterior(mean + weight * (state.probit + off - mean), variance)


class Noise(Unlearned):
    """An oracle for the wrong prefix: its answers are as spread as the truth, and say nothing of it."""

    def __init__(self, population: Population, hidden: Hidden) -> None:
        super().__init__()
        self.hidden = hidden
        self._laws = [population.law(depth) for depth in range(population.max_turns)]

    def see(self, prefix: Prefix) -> Prediction:
        assert prefix.features is not None
        state = self.hidden[prefix.features]
        mean, spread = self._laws[state.depth]
        return Prediction(normal_cdf(mean + spread * random.Random(state.key ^ _NOISE).gauss(0, 1)), 0.0)


def _weights(spread: float, blur: float) -> tuple[float, float]:
    """How far an observation moves the posterior's mean from the prior's, and the posterior's variance."""
    weight = spread**2 / (spread**2 + blur**2)
    return weight, weight * blur**2


def _posterior(mean: float, variance: float) -> Prediction:
    """Mean and standard deviation of Φ(z) for z from N(mean, variance)."""
    h = mean / math.sqrt(1 + variance)
    first = normal_cdf(h)
    if variance == 0:
        return Prediction(first, 0.0)
    second = first - 2 * owens_t(h, 1 / math.sqrt(1 + 2 * variance))
    return Prediction(first, math.sqrt(max(0.0, second - first**2)))


def owens_t(h: float, a: float) -> float:
    """T(h, a) = 1/2π ∫_0^a exp(−h²(1 + x²)/2) / (1 + x²) dx for a in [0, 1], to about 1e-9 for |h| < 5."""
    total = 0.0
    for node, weight in _LEGENDRE:
        square = 1 + (0.5 * a * (1 + node)) ** 2
        total += weight * math.exp(-0.5 * h * h * square) / square
    return total * a / (4 * math.pi)


# ---------------------------------------------------------------------------------------------- how good


def root_auc(population: Population, blur: float) -> float:
    """Chance that a solved continuation from a root was given a higher y = z + noise than an unsolved one.

    With y normal and P(solved | y) = Φ(h(y)), by the trapezoidal rule over ±8 standard deviations of y.
    """
    weight, variance = _weights(population.spread, blur)
    wide = math.hypot(population.spread, blur)
    won = solved = unsolved = 0.0
    for i in range(2001):
        u = -8.0 + 16.0 * i / 2000
        density = math.exp(-0.5 * u * u)
        y = wide * u
        success = normal_cdf((population.centre + weight * y) / math.sqrt(1 + variance))
        won += density * success * (unsolved + 0.5 * density * (1 - success))
        solved += density * success
        unsolved += density * (1 - success)
    return won / (solved * unsolved)


def blur_for(population: Population, auc: float) -> float:
    """The noise at which a predictor has this area under the ROC curve at roots, by bisection."""
    low, high = 0.0, 1000.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if root_auc(population, middle) > auc else (low, middle)
    return low
