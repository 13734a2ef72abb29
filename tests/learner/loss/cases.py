"""Micro-batches written out as plain numbers, and what each loss says about them, one pair at a time."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common.config_learner import LossConfig
from learner.loss import LOSSES
from learner.streams import Streams

SETTINGS: dict[str, LossConfig] = {
    "ppo": LossConfig(name="ppo", clip_low=0.2, clip_high=0.28, dual_clip=1.6),
    "cispo": LossConfig(name="cispo", clip_low=0.3, clip_high=0.5),
    "gspo": LossConfig(name="gspo", clip_low=0.1, clip_high=0.15),
    "topr": LossConfig(name="topr"),
    "dppo": LossConfig(name="dppo", clip_low=0.05, clip_high=0.1, log_ratio_penalty=0.07),
    "reinforce": LossConfig(name="reinforce"),
}
"""Bounds that random cases meet on both sides."""


@dataclass(frozen=True)
class Token:
    logprob: float
    old: float
    behaviour: float
    counts: bool = True


@dataclass(frozen=True)
class Pair:
    token: int
    branch: int
    advantage: float
    weight: float = 1.0
    turn: int = 0


@dataclass
class Case:
    """Tokens and the branches that train them."""

    tokens: list[Token]
    pairs: list[Pair]
    branches: int = field(init=False)

    def __post_init__(self) -> None:
        self.branches = 1 + max((pair.branch for pair in self.pairs), default=-1)

    def streams(self) -> Streams:
        """As tensors in double precision; `logprobs` is a leaf."""

        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64)

        sums: dict[str, list[float]] = {name: [0.0] * len(self.tokens) for name in ("+", "-", "1")}
        for pair in self.pairs:
            sums["+"][pair.token] += pair.weight * max(pair.advantage, 0.0)
            sums["-"][pair.token] += pair.weight * max(-pair.advantage, 0.0)
            sums["1"][pair.token] += pair.weight
        return Streams(
            logprobs=column([token.logprob for token in self.tokens]).requires_grad_(),
            old=column([token.old for token in self.tokens]),
            behaviour=column([token.behaviour for token in self.tokens]),
            mask=torch.tensor([token.counts for token in self.tokens], dtype=torch.bool),
            positive=column(sums["+"]),
            negative=column(sums["-"]),
            weights=column(sums["1"]),
            pair_tokens=torch.tensor([pair.token for pair in self.pairs], dtype=torch.int64),
            pair_branches=torch.tensor([pair.branch for pair in self.pairs], dtype=torch.int64),
            pair_turns=torch.tensor([pair.turn for pair in self.pairs], dtype=torch.int64),
            pair_advantages=column([pair.advantage for pair in self.pairs]),
            pair_weights=column([pair.weight for pair in self.pairs]),
            branches=self.branches,
        )

    def rows(self) -> Case:
        """Branch by branch: every pair has a token of its own."""
        tokens = [self.tokens[pair.token] for pair in self.pairs]
        return Case(tokens, [dataclasses.replace(pair, token=at) for at, pair in enumerate(self.pairs)])

    def only(self, branches: Sequence[int]) -> Case:
        """The micro-batch of some of the branches, with their tokens only."""
        pairs = [pair for pair in self.pairs if pair.branch in branches]
        kept = sorted({pair.token for pair in pairs})
        return Case(
            [self.tokens[token] for token in kept],
            [
                dataclasses.replace(
                    pair, token=kept.index(pair.token), branch=list(branches).index(pair.branch)
                )
                for pair in pairs
            ],
        )


def random_case(seed: int, *, off_policy: float = 0.4, masked: float = 0.2) -> Case:
    """A tree: branches share a beginning of random length, then go on alone. Old, behaviour and current
    policies differ from one another."""
    rng = random.Random(seed)
    tokens: list[Token] = []
    pairs: list[Pair] = []

    def token() -> int:
        logprob = rng.uniform(-3, -0.05)
        old, behaviour = (min(-1e-3, logprob + rng.gauss(0, off_policy)) for _ in range(2))
        tokens.append(Token(logprob, old, behaviour, counts=rng.random() >= masked))
        return len(tokens) - 1

    trunk = [token() for _ in range(rng.randint(1, 3))]
    for branch in range(rng.randint(1, 4)):
        path = trunk[: rng.randint(0, len(trunk))] + [token() for _ in range(rng.randint(1, 3))]
        weight = rng.choice([0.25, 0.5, 1.0])
        turns = sorted(rng.randint(0, 1) for _ in path)
        paid = [rng.choice([rng.uniform(-2, 2), 0.0]), rng.uniform(-2, 2)]
        pairs += [
            Pair(at, branch, paid[turn], weight, 2 * branch + turn)
            for at, turn in zip(path, turns, strict=True)
        ]
    return Case(tokens, pairs)


def loss_of(name: str, case: Case, settings: LossConfig | None = None) -> tuple[list[float], list[float]]:
    """(loss `[N]`, gradient of its sum `[N]`) as the learner computes them."""
    streams = case.streams()
    loss = LOSSES[name].function(streams, settings or SETTINGS[name]).loss
    (gradient,) = torch.autograd.grad(loss.sum(), streams.logprobs)
    return loss.tolist(), gradient.tolist()


# ----------------------------------------------------------------------------------------------- oracles

Oracle = Callable[[Case, Pair, Sequence[float], LossConfig], float]
"""(case, pair, live, settings): the pair's loss without its weight. `live` are log π to be differentiated by;
what stands behind a stop-gradient is read from the case instead."""


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def mean_log_ratio(case: Case, branch: int, base: Callable[[Token], float]) -> float:
    own = [case.tokens[pair.token] for pair in case.pairs if pair.branch == branch]
    own = [token for token in own if token.counts]
    return sum(token.logprob - base(token) for token in own) / len(own)


def ppo(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    r, a = math.exp(live[pair.token] - case.tokens[pair.token].old), pair.advantage
    surrogate = min(r * a, clip(r, 1 - settings.clip_low, 1 + settings.clip_high) * a)
    if a < 0 and settings.dual_clip:
        surrogate = max(surrogate, settings.dual_clip * a)
    return -surrogate


def cispo(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    token = case.tokens[pair.token]
    r = math.exp(token.logprob - token.old)
    kept = clip(r, 1 - settings.clip_low, 1 + settings.clip_high)
    return -kept * pair.advantage * live[pair.token]


def gspo(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    s = math.exp(mean_log_ratio(case, pair.branch, lambda token: token.old))
    s_t = s * math.exp(live[pair.token] - case.tokens[pair.token].logprob)
    clipped = clip(s_t, 1 - settings.clip_low, 1 + settings.clip_high)
    return -min(s_t * pair.advantage, clipped * pair.advantage)


def topr(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    rho = math.exp(mean_log_ratio(case, pair.branch, lambda token: token.behaviour))
    kept = 1.0 if pair.advantage >= 0 else clip(rho, 0.0, 1.0)
    return -kept * pair.advantage * live[pair.token]


def dppo(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    token = case.tokens[pair.token]
    moved = math.exp(token.logprob) - math.exp(token.behaviour)
    if pair.advantage > 0:
        keep = not moved > settings.clip_high
    else:
        keep = not moved < -settings.clip_low
    log_ratio = live[pair.token] - token.behaviour
    return -keep * pair.advantage * math.exp(log_ratio) + settings.log_ratio_penalty * log_ratio**2


def reinforce(case: Case, pair: Pair, live: Sequence[float], settings: LossConfig) -> float:
    return -pair.advantage * live[pair.token]


ORACLES: dict[str, Oracle] = {
    "ppo": ppo, "cispo": cispo, "gspo": gspo, "topr": topr, "dppo": dppo, "reinforce": reinforce,
}  # fmt: skip


def oracle(name: str, case: Case, live: Sequence[float] | None = None) -> list[float]:
    """Loss of each token, `[N]`, summed branch by branch."""
    values = [token.logprob for token in case.tokens] if live is None else live
    total = [0.0] * len(case.tokens)
    for pair in case.pairs:
        if case.tokens[pair.token].counts:
            total[pair.token] += pair.weight * ORACLES[name](case, pair, values, SETTINGS[name])
    return total


def oracle_gradient(name: str, case: Case, step: float = 1e-6) -> list[float]:
    """Central differences of the summed loss by each log π, `[N]`."""
    gradient = []
    for at in range(len(case.tokens)):
        sums = []
        for sign in (1, -1):
            live = [token.logprob for token in case.tokens]
            live[at] += sign * step
            sums.append(math.fsum(oracle(name, case, live)))
        gradient.append((sums[0] - sums[1]) / (2 * step))
    return gradient
