"""Measured arms, and what they are at equal continuations and at equal tokens.

A size (continuations per prompt) is a whole number, so no size has exactly the leaves or the tokens of the
baseline. An arm is therefore measured at two sizes that enclose the target, and reported as their mixture: a
share of prompts gets the larger one, such that the mean is the target. That is an allocation that could be
run, not a fit; as returns diminish it is, if anything, a little less than one size could do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from benchmarks.allocation_arms import Arm, Bench, Seen, auc
from benchmarks.contrast import Sums, mixture
from benchmarks.partial import Partial
from benchmarks.population import Population
from benchmarks.results import BenchmarkFailed

CLOSE = 0.005
"""A size within half a percent of the target is at the target."""
BEYOND = 1.1
"""A second guess goes a tenth further than a straight line says: tokens grow a little less than that."""
MAX_SIZES = 120
"""Sizes looked at before an arm is said to be out of reach of the target."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An arm of one size, seed by seed."""

    population: str
    arm: Arm
    size: int
    sums: tuple[Sums, ...]
    auc_roots: float | None = None
    """Of its predictor, over all seeds, at prefixes that no rule selected."""
    auc_prefixes: float | None = None

    def mean(self, name: str) -> float:
        """Per prompt, over all seeds; `name` is a field of `Sums`."""
        return math.fsum(getattr(s, name) for s in self.sums) / math.fsum(s.prompts for s in self.sums)

    def to_json(self) -> dict[str, Any]:
        sums = {f.name: [getattr(s, f.name) for s in self.sums] for f in fields(Sums)}
        return {
            "population": self.population, "rule": self.arm.rule, "budget": self.arm.budget,
            "predictor": self.arm.predictor, "weights": self.arm.weights, "overhead": self.arm.overhead,
            "candidates": self.arm.candidates,
            "size": self.size,
            "auc_roots": self.auc_roots, "auc_prefixes": self.auc_prefixes, "sums": sums,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Measured:
        weights = found["weights"] and tuple(found["weights"])
        arm = Arm(
            found["rule"],
            found["budget"],
            found["predictor"],
            weights,
            found["overhead"],
            found["candidates"],
        )
        rows = zip(*(found["sums"][f.name] for f in fields(Sums)), strict=True)
        sums = tuple(Sums(*row) for row in rows)
        return cls(found["population"], arm, found["size"], sums, found["auc_roots"], found["auc_prefixes"])


@dataclass(frozen=True, slots=True)
class Matched:
    """An arm at the target: the share `share` of its prompts has the larger size."""

    low: Measured
    high: Measured
    share: float

    def sums(self) -> list[Sums]:
        """Seed by seed, per prompt."""
        return [
            mixture(low, high, self.share) for low, high in zip(self.low.sums, self.high.sums, strict=True)
        ]


class Runs:
    """Measures what is asked for, once; what was measured is kept on disk.

    Args:
        bench: runs an arm.
        seeds: of all arms.
        partial: where finished measurements are kept.
        say: told of each measurement.
    """

    def __init__(self, bench: Bench, seeds: int, partial: Partial, say: Callable[[str], None]) -> None:
        self.bench, self.seeds, self.partial, self.say = bench, seeds, partial, say
        self.found: dict[tuple[str, Arm, int], Measured] = {}

    def at(self, population: Population, arm: Arm, size: int) -> Measured:
        """The arm at a size."""
        key = (population.name, arm, size)
        if key not in self.found:
            name = f"{population.name}: {arm.name} × {arm.weights or 'default'}"
            kept = self.partial.get(size, name)
            if kept is None:
                self.found[key] = self._measure(population, arm, size)
                self.partial.keep(size, name, [self.found[key].to_json()])
            else:
                self.found[key] = Measured.from_json(kept[0])
        return self.found[key]

    def _measure(self, population: Population, arm: Arm, size: int) -> Measured:
        sums, seen = [], Seen()
        for seed in range(self.seeds):
            of_seed, looked = self.bench.grow(population, arm, size, seed)
            sums.append(of_seed)
            seen.roots += looked.roots
            seen.prefixes += looked.prefixes
        found = Measured(population.name, arm, size, tuple(sums), auc(seen.roots), auc(seen.prefixes))
        contrast = math.fsum(s.contrasting for s in sums) / math.fsum(s.leaves for s in sums)
        self.say(
            f"{population.name} {arm.name}, size {size}: contrast {contrast:.3f}, {found.mean('leaves'):.1f} "
            f"continuations, {found.mean('tokens'):.0f} tokens per prompt"
        )
        return found

    def matched(
        self, population: Population, arm: Arm, name: str, target: float, slack: float = 0
    ) -> Matched:
        """The arm where its mean `name` (`leaves` or `tokens`) per prompt is `target`.

        `slack` is by what share the population's own size may exceed it and still count as equal.

        Raises:
            BenchmarkFailed: no size reaches the target.
        """
        sizes = list(islice(arm.sizes(), MAX_SIZES))
        start = max((at for at, size in enumerate(sizes) if size <= population.group), default=0)
        own = self.at(population, arm, sizes[start])
        off = own.mean(name) / target - 1
        if -CLOSE <= off <= max(CLOSE, slack):
            return Matched(own, own, 0.0)
        below, above = (own, None) if off < 0 else (None, own)
        wanted = own.size / (1 + off)
        while below is None or above is None:
            size = _beyond(sizes, wanted, below, above)
            if size is None:
                raise BenchmarkFailed(f"no size of {arm.name} has {target:.0f} {name} a prompt")
            found = self.at(population, arm, size)
            last = below or above
            assert last is not None
            if found.mean(name) < target:
                below = found
            else:
                above = found
            wanted = _secant(last, found, name, target)
        width = above.mean(name) - below.mean(name)
        return Matched(below, above, (target - below.mean(name)) / width)


def _beyond(
    sizes: Sequence[int], wanted: float, below: Measured | None, above: Measured | None
) -> int | None:
    """The size nearest to `wanted` on its far side, beyond what was measured; None where there is none."""
    if below is not None:
        return next((size for size in sizes if size >= wanted and size > below.size), None)
    assert above is not None
    return next((size for size in reversed(sizes) if size <= wanted and size < above.size), None)


def _secant(last: Measured, found: Measured, name: str, target: float) -> float:
    """Where the line through two sizes reaches the target, and a little further."""
    slope = (found.mean(name) - last.mean(name)) / (found.size - last.size)
    if slope <= 0:
        return 2.0 * found.size if found.size > last.size else 0.5 * found.size
    way = (target - found.mean(name)) / slope
    return found.size + BEYOND * way
