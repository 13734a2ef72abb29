"""Plain searches for the rules that look at what came of earlier continuations, written from the papers.

They know nothing of the allocator and see continuations only after their ends. In their toy world a turn depends
on the seed of its lease and its offset alone, and has one token.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from common.config_allocator import EntropyRuleConfig, TraceRuleConfig, UucbRuleConfig
from common.nouns import Turn, floats_to_bytes
from common.seeds import turn_seed

Place = tuple[int, int]
"""(owner, offset) of a turn; (-1, 0) is the prompt."""
START: Place = (-1, 0)

ARPO = EntropyRuleConfig(initial=4, weight=1.0, vocabulary=20)
AT2PO = EntropyRuleConfig(form="at2po", initial=4, beam=3, sibling_penalty=0.25)
TRACE, UUCB = TraceRuleConfig(), UucbRuleConfig()
CONTRAST = UucbRuleConfig(potential="contrast", exploration=0.02, entropy=0.02)


def entropy(seed: int, offset: int) -> float:
    """Of the token of a turn, in eighths of a nat."""
    return (turn_seed(seed, offset) >> 11) % 24 / 8


def surprise(seed: int, offset: int) -> float:
    """−log p of that token."""
    return (turn_seed(seed, offset) >> 17) % 24 / 8


def told(seed: int, offset: int, plain: Turn) -> Turn:
    """The turn with what the engine says of its token."""
    entropies, logprobs = [entropy(seed, offset)], [-surprise(seed, offset)]
    return msgspec.structs.replace(
        plain, entropies=floats_to_bytes(entropies), logprobs=floats_to_bytes(logprobs)
    )


class Run(Protocol):
    """A continuation that has ended."""

    number: int
    anchor: Place
    chain: int
    seed: int


@dataclass
class Looking:
    """One tree of one of these searches. `next` says where continuations start, with a label each."""

    continuations: int
    length: Callable[[int], int]
    """Turns of a continuation, by its seed."""
    reward: Callable[[int], float]
    value: Callable[[int], float]
    """Success predicted at a depth."""

    def next(self, rule: str, runs: list[Run], rng: random.Random) -> list[tuple[Place, int]]:
        initial = {
            "arpo": ARPO.initial,
            "at2po": AT2PO.initial,
            "trace": self.continuations // (1 + TRACE.per_root),
            "uucb": UUCB.initial,
            "contrast": CONTRAST.initial,
        }[rule]
        if not runs:
            return [(START, 0)] * initial
        if rule == "arpo":
            return self.arpo(runs, rng)
        if rule == "at2po":
            return self.at2po(runs)
        if rule == "trace":
            return self.trace(runs, initial)
        return [(self.uucb(runs, CONTRAST if rule == "contrast" else UUCB), 0)]

    def arpo(self, runs: list[Run], rng: random.Random) -> list[tuple[Place, int]]:
        """Labels are levels. Draws go on where those of the levels without a branch stopped."""
        level = max(run.chain for run in runs) + 1
        while True:
            reached = [(run, level - 1 - self.depth(runs, run.anchor)) for run in runs]
            turns = [(run, k) for run, k in reached if 0 <= k < self.length(run.seed)]
            if not turns:
                return [(START, -1)] * self.continuations
            picks: list[tuple[Place, int]] = []
            for run, k in turns:
                if k < self.length(run.seed) - 1 and len(runs) + len(picks) < self.continuations:
                    change = (entropy(run.seed, k) - self.first_entropy(runs, run)) / math.log(
                        ARPO.vocabulary
                    )
                    if rng.random() - ARPO.weight * change < ARPO.threshold:
                        picks.append(((run.number, k), level))
            if picks:
                return picks
            level += 1

    def first_entropy(self, runs: list[Run], run: Run) -> float:
        while run.anchor != START:
            run = runs[run.anchor[0]]
        return entropy(run.seed, 0)

    def at2po(self, runs: list[Run]) -> list[tuple[Place, int]]:
        children = Counter(
            self.before(runs, (run.number, k)) for run in runs for k in range(self.length(run.seed))
        )
        scores = {(START, START): -AT2PO.sibling_penalty * (children[START] - 1)}
        for place in self.opens(runs):
            origin = self.before(runs, place)
            penalty = AT2PO.sibling_penalty * (children[origin] - 1)
            scores[place, origin] = surprise(runs[place[0]].seed, place[1]) - penalty
        best = sorted(scores, key=lambda key: (-scores[key], key[0]))
        return [(origin, 1 + runs[-1].chain) for _, origin in (best * AT2PO.beam)[: AT2PO.beam]]

    def trace(self, runs: list[Run], roots: int) -> list[tuple[Place, int]]:
        agree = {}
        for place in self.opens(runs):
            value = self.value(self.depth(runs, place))
            agree[place] = value if self.reward(runs[place[0]].seed) else 1 - value
        started = dict.fromkeys(agree, 0)
        picks: list[tuple[Place, int]] = []
        while agree and len(picks) < self.continuations - roots:
            best = min(agree, key=lambda p: (-(agree[p] ** started[p]) * (1 - agree[p]), started[p], p))
            picks.append((best, 0))
            started[best] += 1
        return picks or [(START, 0)] * self.continuations

    def uucb(self, runs: list[Run], weights: UucbRuleConfig) -> Place:
        """All have ended, so what is missing under a place is known."""
        visits = Counter(run.anchor for run in runs)
        seen: dict[Place, set[float]] = {}
        sampled: dict[Place, list[float]] = {}
        for run in runs:
            last = (run.number, self.length(run.seed) - 1)
            for place in self.line(runs, last):
                seen.setdefault(place, set()).add(self.reward(run.seed))
            for k in range(last[1] + 1):
                origin = self.before(runs, (run.number, k))
                sampled.setdefault(origin, []).append(entropy(run.seed, k))
        gains = {}
        for place in [START, *self.opens(runs)]:
            value = self.value(self.depth(runs, place))
            potential = 0.0 if weights is CONTRAST else 4 * value * (1 - value)
            for above in self.line(runs, place) if weights is CONTRAST else ():
                chance = value * (1.0 not in seen[above]) + (1 - value) * (0.0 not in seen[above])
                potential += weights.decay ** self.depth(runs, above) * chance
            exploration = math.sqrt(math.log(self.continuations) / (1 + visits[place]))
            usual = sum(sampled[place]) / len(sampled[place])
            bonuses = weights.exploration * exploration + weights.entropy * usual
            gains[place] = weights.value * potential + bonuses
        best = max(gains.values())
        return next(place for place in gains if gains[place] > best - 1e-12)

    # --- walking ----------------------------------------------------------------------------------------

    def opens(self, runs: list[Run]) -> list[Place]:
        """Turns after which a continuation went on, in order."""
        return [(run.number, k) for run in runs for k in range(self.length(run.seed) - 1)]

    def before(self, runs: list[Run], place: Place) -> Place:
        """Where a turn began."""
        return (place[0], place[1] - 1) if place[1] else runs[place[0]].anchor

    def line(self, runs: list[Run], place: Place) -> list[Place]:
        """A place and all before it, up to the prompt."""
        line = [place]
        while line[-1] != START:
            line.append(self.before(runs, line[-1]))
        return line

    def depth(self, runs: list[Run], place: Place) -> int:
        return len(self.line(runs, place)) - 1
