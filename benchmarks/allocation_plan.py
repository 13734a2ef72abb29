"""What the allocation benchmark measures: which arms on which populations, in which tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.allocation_arms import BUDGETS, READERS, RULES, Arm, Length
from benchmarks.allocation_report import INFOTREE, TRACE
from benchmarks.population import POPULATIONS, Population
from benchmarks.population_predictors import root_auc

FLAT = Arm("flat")
RANDOM = Arm("random", predictor="none")
CONTROLS = ("none", "noise", "oracle")
SWEPT = ("0.60", "0.70", "0.80", "0.90", "0.95")
"""Areas under the ROC curve of blurred oracles."""
PAPER_ARMS = {"A": TRACE, "B": TRACE, "C": INFOTREE}
QUICK_ARMS = {"B": [TRACE], "C": [INFOTREE, ("flat", "adaptive")]}
"""Of the quick tier, beside all of A's."""
QUICK_PREDICTORS = {"A": ("noise", "0.80", "0.95", "oracle"), "B": ("noise", "oracle"), "C": ("oracle",)}
OVERHEADS = (0.1, 0.2, 0.4)
POOLS = (1, 2, 8)
OTHERWISE = {"reveal": (0.1, 0.4), "prompt_noise": (1.0, 4.0)}
"""Constants of the populations that no paper states, and other values of theirs. The flat rates, which depend
on none of them, stay."""
GRID = "C"
"""Population of the grid of weights."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""InfoTree's grid is 5 × 5 × 5; its values are not public: these times the defaults."""


@dataclass(frozen=True, slots=True)
class Tier:
    """How much is measured."""

    length: Length
    quick: bool

    @property
    def parts(self) -> tuple[str, ...]:
        """What can be measured apart: populations, variants of them, the grid."""
        return tuple(POPULATIONS) if self.quick else (*POPULATIONS, "variants", "grid")

    def arms(self, population: Population) -> Iterator[Arm]:
        """The arms of a population, beside `flat` and `random`."""
        for arm in product(RULES, BUDGETS):
            if not self.quick or population.name == "A" or arm in QUICK_ARMS[population.name]:
                yield learned(*arm)
        yield from self._otherwise(population)
        for rule, budget in self._swept(population):
            for known in self._predictors(population):
                yield Arm(rule, budget, known)
                if not self.quick and (rule == "trace" or known in CONTROLS):
                    yield Arm(rule, "fixed", known)

    def accountings(self, population: Population, arm: Arm) -> Iterator[str]:
        """In which sense an arm is compared; the quick tier leaves out some at equal tokens."""
        yield "continuations"
        own = ("fixed", PAPER_ARMS[population.name[0]][1])
        if not self.quick or (arm.budget in own and (arm.rule != "uucb" or population.name == "C")):
            yield "tokens"

    def _swept(self, population: Population) -> list[tuple[str, str]]:
        """Arms that are told more or less."""
        if population.name == "A" and not self.quick:
            return [TRACE, INFOTREE]
        return [PAPER_ARMS[population.name]]

    def _predictors(self, population: Population) -> tuple[str, ...]:
        if self.quick:
            return QUICK_PREDICTORS[population.name]
        ceiling = root_auc(population, 0.0)
        return (*CONTROLS, "history", *(level for level in SWEPT if float(level) < ceiling))

    def _otherwise(self, population: Population) -> Iterator[Arm]:
        """InfoTree's budget beyond the paper's overhead, and TRACE's with other pools."""
        if self.quick:
            return
        for known in ("shared", "oracle"):
            if population.name == "C":
                yield from (Arm(*INFOTREE, known, overhead=overhead) for overhead in OVERHEADS)
            else:
                yield from (Arm(*TRACE, known, candidates=candidates) for candidates in POOLS)


def learned(rule: str, budget: str) -> Arm:
    """The arm with the predictor that learns; with none where nobody would ask it. Beside `flat × fixed` it
    learns all the same, to be seen at prefixes that nobody selected."""
    if (rule, budget) == (FLAT.rule, FLAT.budget):
        return FLAT
    return Arm(rule, budget, "shared" if rule in READERS or budget != "fixed" else "none")


def variants() -> Iterator[tuple[Population, list[Arm]]]:
    """Populations that differ from A or C in a constant of ours, and the arms of their papers."""
    for name in ("A", "C"):
        base = POPULATIONS[name]
        for constant, values in OTHERWISE.items():
            for value in values:
                called = f"{name}, {constant} {value:g}"
                arms = [Arm(*PAPER_ARMS[name], known) for known in ("shared", "noise", "oracle")]
                yield replace(base, name=called, **{constant: value}), arms  # type: ignore[arg-type]
