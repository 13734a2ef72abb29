"""The arms of the allocation benchmark: which rule, budget and predictor, and one run of it under one seed.

An arm is scaled by `size`, the continuations that its budget gives a prompt, without changing its shape: a
third of Tree-GRPO's and TRACE's continuations start at the prompt and two thirds at prefixes (N = 2), half of
ARPO's, 10 of 22 of AT²PO's. The other rules have no shape to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from allocator.budgets import make_budget
from allocator.rules import make_rule
from benchmarks.contrast import Sums, add, measure
from benchmarks.population import Population, State
from benchmarks.population_predictors import Blind, Noise, Sighted, blur_for
from benchmarks.population_search import Search
from common.config_allocator import (
    AdaptiveConfig,
    BudgetConfig,
    EntropyRuleConfig,
    IgrpoRuleConfig,
    PatrRuleConfig,
    PredictorConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
    TraceRuleConfig,
    UucbRuleConfig,
    root_cost,
)
from common.nouns import NO_LEASE, ROOT, Tree
from common.predictor import Predictor
from common.predictors import make_predictor

CANDIDATES = 4
"""Prompts per place of TRACE's pool. The paper does not say; with a flat rate of 26.8 % a pool of 4 holds
about as many mixed prompts as there are places. A candidate costs no tokens."""
EXTRA = 2
"""Continuations of one rescue at an overhead of 5 %."""
PATR_INTERVAL = 2
"""K, where episodes have 3 to 8 turns: with the paper's 5 or 13 there would hardly be a scoring point."""

RULES: dict[str, tuple[Callable[[int], RuleConfig], int]] = {
    "flat": (lambda size: RuleConfig(), 1),
    "random": (lambda size: RandomRuleConfig(chains=max(1, size // 3), expansions=2), 3),
    "arpo": (lambda size: EntropyRuleConfig(form="arpo", initial=max(1, size // 2)), 2),
    "at2po": (
        lambda size: EntropyRuleConfig(
            form="at2po", initial=max(1, round(size * 10 / 22)), beam=max(1, round(size * 6 / 22))
        ),
        1,
    ),
    "uucb": (lambda size: UucbRuleConfig(), 1),
    "trace": (lambda size: TraceRuleConfig(), 3),
    "patr": (lambda size: PatrRuleConfig(interval=PATR_INTERVAL), 1),
    "igrpo": (lambda size: IgrpoRuleConfig(), 1),
}
"""Rule -> its configuration at a size, and the step between sizes that keep its shape."""
BUDGETS = ("fixed", "trace_roots", "adaptive")
READERS = ("uucb", "trace")
"""Rules that ask the predictor."""
LEARNERS = ("shared", "history")
APART = 10_000
"""Between the seed of a run and that of its predictor's warm-up, which must not meet the same prompts."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to grow trees."""

    rule: str
    budget: str = "fixed"
    predictor: str = "shared"
    """`shared` or `history` learn; `none` says one half; `noise` looks at the wrong prefix; `oracle` knows;
    `0.80` is blurred to that area under the ROC curve at roots."""
    weights: tuple[float, float, float] | None = None
    """Value, exploration and entropy of `uucb`; None = its defaults."""
    overhead: float = 0.05
    """Of `adaptive`. What it gives a tree grows with it, else it could not be spent: 2 at 0.05."""

    candidates: int = CANDIDATES
    """Of `trace_roots`."""

    @property
    def name(self) -> str:
        more = f" {self.overhead:g}" if self.budget == "adaptive" and self.overhead != 0.05 else ""
        more += (
            f" {self.candidates}" if self.budget == "trace_roots" and self.candidates != CANDIDATES else ""
        )
        return f"{self.rule} × {self.budget}{more} × {self.predictor}"

    @property
    def asks(self) -> bool:
        """Whether what the predictor says changes what it does."""
        return self.rule in READERS or self.budget != "fixed"

    @property
    def learns(self) -> bool:
        """Whether its own earlier waves change what it does."""
        return self.budget == "adaptive" or (self.asks and self.predictor in LEARNERS)

    def sizes(self) -> Iterator[int]:
        """Sizes that keep the arm's shape, from the smallest upwards."""
        step = RULES[self.rule][1]
        pairs = 2 if self.budget == "trace_roots" else 1
        return count(step * pairs, step)

    def rule_config(self, size: int) -> RuleConfig:
        config = RULES[self.rule][0](size)
        if self.weights is None or not isinstance(config, UucbRuleConfig):
            return config
        value, exploration, entropy = self.weights
        return replace(config, value=value, exploration=exploration, entropy=entropy)

    def budget_config(self, size: int) -> BudgetConfig:
        match self.budget:
            case "trace_roots":
                return TraceRootsConfig(continuations=size, candidates=self.candidates)
            case "adaptive":
                extra = max(1, round(EXTRA * self.overhead / 0.05))
                return AdaptiveConfig(continuations=size, overhead=self.overhead, extra=extra)
        return BudgetConfig(continuations=size)

    def make_predictor(self, population: Population, hidden: dict[bytes, State]) -> Predictor:
        match self.predictor:
            case "none":
                return Blind()
            case "noise":
                return Noise(population, hidden)
            case "oracle":
                return Sighted(population, hidden, 0.0)
            case name if name in LEARNERS:
                return make_predictor(PredictorConfig(name=name))
        return Sighted(population, hidden, blur_for(population, float(self.predictor)))


@dataclass(frozen=True, slots=True)
class Length:
    """How much of a population a run sees."""

    batch: int = 16
    """Prompts of a wave."""
    warm: int = 8
    """Flat waves from which a predictor that learns has learned when the run begins."""
    burn_in: int = 2
    """Waves of the arm itself before anything counts, where it learns: predictor and budget get used to what
    it samples. Others leave out their prompts."""
    waves: int = 4
    """Waves that count."""


@dataclass(slots=True)
class Seen:
    """What a predictor said of prefixes that no rule selected (roots, and turns of continuations from them),
    and what came of it. For `auc`."""

    roots: list[tuple[float, bool]] = field(default_factory=list)
    prefixes: list[tuple[float, bool]] = field(default_factory=list)

    def look(self, tree: Tree) -> None:
        for c in tree.continuations:
            if c.anchor != ROOT or c.outcome is None or c.heir_of != NO_LEASE or c.baseline is None:
                continue
            won = c.outcome.raw_reward >= 0.5
            self.roots.append((c.baseline, won))
            values = (tree.nodes[index].value for index in c.nodes)
            self.prefixes += [(value, won) for value in values if value is not None]


class Bench:
    """Runs arms; a learning predictor's warm-up is made once for each population and seed."""

    def __init__(self, length: Length) -> None:
        self.length = length
        self._warm: dict[tuple[str, str, int], dict[str, Any]] = {}

    def grow(self, population: Population, arm: Arm, size: int, seed: int) -> tuple[Sums, Seen]:
        """One run of one arm: sums, and what its predictor saw, over the waves that count."""
        hidden: dict[bytes, State] = {}
        predictor = arm.make_predictor(population, hidden)
        if arm.predictor in LEARNERS:
            predictor.from_state(self._warmed(population, arm.predictor, seed))
        left_out = 0 if arm.learns else self.length.burn_in
        search = self._search(population, arm, size, seed, predictor, hidden, left_out)
        for _ in range(self.length.burn_in - left_out):
            search.wave()
        total, seen = Sums(), Seen()
        for _ in range(self.length.waves):
            trees = search.wave()
            total = total.plus(add(measure(tree) for tree in trees))
            for tree in trees:
                seen.look(tree)
        return total, seen

    def _warmed(self, population: Population, name: str, seed: int) -> dict[str, Any]:
        key = (population.name, name, seed)
        if key not in self._warm:
            hidden: dict[bytes, State] = {}
            arm = Arm("flat", predictor=name)
            predictor = arm.make_predictor(population, hidden)
            search = self._search(population, arm, population.group, seed + APART, predictor, hidden)
            for _ in range(self.length.warm):
                search.wave()
            self._warm[key] = predictor.to_state()
        return self._warm[key]

    def _search(
        self,
        population: Population,
        arm: Arm,
        size: int,
        seed: int,
        predictor: Predictor,
        hidden: dict[bytes, State],
        left_out: int = 0,
    ) -> Search:
        rule, batch = arm.rule_config(size), self.length.batch
        budget = make_budget(arm.budget_config(size), batch, root_cost(rule))
        first = left_out * batch * budget.candidates
        return Search(
            population, make_rule(rule), budget, predictor,
            batch=batch, seed=seed, first=first, hidden=hidden,
        )  # fmt: skip


def auc(pairs: Iterable[tuple[float, bool]]) -> float | None:
    """Area under the ROC curve: the chance that a success was given more than a failure, ties one half.

    None where there were only successes, or only failures.
    """
    ordered = sorted(pairs)
    wins, losses, area, at = 0, 0, 0.0, 0
    while at < len(ordered):
        end = at
        while end < len(ordered) and ordered[end][0] == ordered[at][0]:
            end += 1
        won = sum(outcome for _, outcome in ordered[at:end])
        lost = end - at - won
        area += won * (losses + 0.5 * lost)
        wins, losses, at = wins + won, losses + lost, end
    return area / (wins * losses) if wins and losses else None
