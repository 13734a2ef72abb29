"""Populations of prompts whose hidden success probabilities move as a martingale along the prefix.

    root(prompt) ─▶ State ──step(state, seed)──▶ State ──…──▶ ended: success or not
                      ├─ value(state)         what nobody may see: the exact success probability
                      └─ observables(state)   what an engine and a world would say of it

A prompt has a probit z, drawn from N(centre, spread²); it is solved with probability Φ(z). Each turn reveals
the share c = `reveal` of the variance that is left: with ε from N(0, 1),

    open turn     z' = (z + √c · ε) / √(1 − c)          last turn     solved iff z + ε > 0

so that E[Φ(z')] = Φ(z) = P(solved): the value is a martingale, exactly, whatever the number of turns. That
number is uniform on [min_turns, max_turns] and independent of z: the later a prefix, the fewer turns are
left. Turns have varying numbers of tokens. Everything follows from (population, prompt, seeds of the path).

**Frozen constants.** `spread` and `centre` are solved (`calibrate`) from two figures: the share of prompts
with mixed outcomes among `group` independent continuations, which is the flat rate of a paper, and the mean
success, which no paper states. A trains at TRACE's 26.8 % (8B), B at its 34.7 % (14B), both of 12
continuations; C at InfoTree's 58.1 % of 16. Also ours, since no paper states them: `reveal`, turns, tokens,
and how much of z can be seen. A change of any constant is a new `edition`.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from common.seeds import derive_seed

PHI = NormalDist()
EDITION = 1
"""Of the constants below: results of different editions are not comparable."""
FEATURES = 6
VIEWS = 2
"""Features that see z; the others are noise."""
ENTROPY_FLOOR, ENTROPY_RANGE, ENTROPY_NOISE = 0.2, 0.8, 0.15
"""Nats per token: the floor where the outcome is settled, floor + range where it is open, ± noise."""

_SEEN = 0x5DEECE66D
"""Parts what is seen of a state from what was drawn to make it."""


class State(NamedTuple):
    """A prefix: where its path stands. `probit` is hidden from everything that decides."""

    prompt: int
    depth: int
    """Turns from the root."""
    probit: float
    tokens: int
    """Action tokens of the last turn; 0 at a root."""
    key: int
    """Names the path that led here: what is seen of the state is drawn from it."""
    blur: tuple[float, ...]
    """What each view of the prompt's tree is off by, its process scores, and (in units of one) what a
    predictor that is told of z is off by; all hidden."""
    success: bool | None = None
    """None while the episode goes on."""


class Observables(NamedTuple):
    """What may be seen of a state."""

    features: bytes
    """float32 `[FEATURES]`."""
    entropy: float
    """Mean over the tokens of its last turn, nats."""
    process_score: float
    """In [0, 1]."""


def normal_cdf(z: float) -> float:
    """Φ(z)."""
    return 0.5 * math.erfc(-z * math.sqrt(0.5))


@dataclass(frozen=True, kw_only=True)
class Population:
    """The prompts of one paper's flat rate; see the module docstring for the symbols."""

    name: str
    source: str
    """Whose flat rate."""
    flat_rate: float
    """Share of prompts with mixed outcomes among `group` independent continuations."""
    group: int
    mean_success: float
    centre: float
    spread: float
    reveal: float = 0.25
    min_turns: int = 3
    max_turns: int = 8
    min_tokens: int = 8
    max_tokens: int = 40
    prompt_noise: float = 2.0
    """Standard deviation of what every view of a prompt's tree is off by, in probits."""
    score_noise: float = 4.0
    """The same for its process scores: worlds know less than policies."""
    node_noise: float = 0.6
    """And of what each state's views are off by besides: about one turn's movement of z."""

    # --- the world ---------------------------------------------------------------------------------------

    def root(self, prompt: int) -> State:
        """The prompt, before anything was sampled."""
        key = derive_seed("population", self.name, EDITION, prompt)
        gauss = random.Random(key).gauss
        probit = self.centre + self.spread * gauss(0, 1)
        common = math.sqrt(VIEWS) * self.prompt_noise
        blur = (*(common * gauss(0, 1) for _ in range(VIEWS)), self.score_noise * gauss(0, 1), gauss(0, 1))
        return State(prompt, 0, probit, 0, key, blur)

    def step(self, state: State, seed: int) -> State:
        """One more turn, drawn from `seed` alone.

        Raises:
            ValueError: the episode is over.
        """
        if state.success is not None:
            raise ValueError(f"the episode of prompt {state.prompt} is over")
        draw = random.Random(seed)
        depth = state.depth + 1
        last = draw.random() < self.hazard(depth)
        tokens = self.min_tokens + int(draw.random() * (self.max_tokens - self.min_tokens + 1))
        epsilon = draw.gauss(0, 1)
        key = seed ^ (state.key >> 1)
        if last:
            solved = state.probit + epsilon > 0
            certain = math.inf if solved else -math.inf
            return State(state.prompt, depth, certain, tokens, key, state.blur, solved)
        c = self.reveal
        probit = (state.probit + math.sqrt(c) * epsilon) / math.sqrt(1 - c)
        return State(state.prompt, depth, probit, tokens, key, state.blur)

    def hazard(self, depth: int) -> float:
        """Chance that turn number `depth` is the last, given that it is taken."""
        return 0.0 if depth < self.min_turns else 1.0 / max(1, self.max_turns + 1 - depth)

    def value(self, state: State) -> float:
        """Exact probability of success from here."""
        return normal_cdf(state.probit)

    def observables(self, state: State) -> Observables:
        """What an engine (features, entropy) and the world (process score) say of an open state."""
        z, gauss = state.probit, random.Random(state.key ^ _SEEN).gauss
        own = math.sqrt(VIEWS) * self.node_noise
        views = [z + state.blur[view] + own * gauss(0, 1) for view in range(VIEWS)]
        noise = [self.spread * gauss(0, 1) for _ in range(FEATURES - VIEWS)]
        score = normal_cdf(z + state.blur[VIEWS] + self.node_noise * gauss(0, 1))
        openness = 4 * normal_cdf(z) * normal_cdf(-z)
        entropy = ENTROPY_FLOOR + ENTROPY_RANGE * openness + ENTROPY_NOISE * gauss(0, 1)
        return Observables(struct.pack(f"<{FEATURES}f", *views, *noise), max(0.01, entropy), score)

    # --- what is known exactly ---------------------------------------------------------------------------

    def law(self, depth: int) -> tuple[float, float]:
        """Mean and standard deviation of z over open states of a depth, no branching assumed: it is
        normal."""
        mean, variance, c = self.centre, self.spread**2, self.reveal
        for _ in range(depth):
            mean, variance = mean / math.sqrt(1 - c), (variance + c) / (1 - c)
        return mean, math.sqrt(variance)

    def mixed(self, group: int) -> float:
        """Exact share of prompts with both outcomes among `group` independent continuations."""
        return mixed_rate(self.centre, self.spread, group)


def mixed_rate(centre: float, spread: float, group: int) -> float:
    """E[1 − p^G − (1−p)^G] for p = Φ(z), z from N(centre, spread²), to about 1e-9.

    The trapezoidal rule over ±9 standard deviations converges geometrically for this integrand as long as
    its step is small against the width of Φ.
    """
    steps = 400 + int(400 * spread)
    total = weights = 0.0
    for i in range(steps + 1):
        u = -9.0 + 18.0 * i / steps
        weight = math.exp(-0.5 * u * u)
        z = centre + spread * u
        p, q = normal_cdf(z), normal_cdf(-z)
        total += weight * (1.0 - p**group - q**group)
        weights += weight
    return total / weights


def calibrate(flat_rate: float, group: int, mean_success: float) -> tuple[float, float]:
    """`(centre, spread)` that give a population this flat rate and this mean success.

    E[Φ(z)] = Φ(centre / √(1 + spread²)) fixes the centre; the rate falls as the spread grows: bisection.
    """
    low, high = 0.01, 100.0
    quantile = PHI.inv_cdf(mean_success)
    while high - low > 1e-9:
        spread = (low + high) / 2
        rate = mixed_rate(quantile * math.hypot(1.0, spread), spread, group)
        low, high = (spread, high) if rate > flat_rate else (low, spread)
    return quantile * math.hypot(1.0, low), low


A = Population(
    name="A", source="TRACE, Qwen3-8B: effective contrast 26.8 % under flat sampling",
    flat_rate=0.268, group=12, mean_success=0.6, centre=1.184161, spread=4.565839,
)  # fmt: skip
B = Population(
    name="B", source="TRACE, Qwen3-14B: effective contrast 34.7 % under flat sampling",
    flat_rate=0.347, group=12, mean_success=0.6, centre=0.911288, spread=3.455194,
)  # fmt: skip
C = Population(
    name="C", source="InfoTree: mixed-outcome ratio 58.1 % before its adaptive budget",
    flat_rate=0.581, group=16, mean_success=0.4, centre=-0.574222, spread=2.034015,
)  # fmt: skip
POPULATIONS = {population.name: population for population in (A, B, C)}
