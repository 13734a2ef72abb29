"""The enumerated world: exact values, every way a tree can go, and nothing counted twice."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from allocator.budgets import make_budget
from allocator.rules import make_rule
from allocator.settings import Settings
from benchmarks.tabular import Chooser, EnumeratedForest, World, enumerate_all, grow, history
from common.config_allocator import BudgetConfig, RandomRuleConfig, RuleConfig
from common.nouns import Tree
from common.predictor import HistoryPredictor

WORLD = World(
    policy={(): (0.25, 0.75), (0,): (0.5, 0.5)},
    rewards={(0,): 0.25, (0, 1): 1.0, (1,): 0.5},
)


def forest(rule: RuleConfig, continuations: int) -> EnumeratedForest:
    budget = make_budget(BudgetConfig(continuations=continuations))
    return EnumeratedForest(Settings(), make_rule(rule), budget, HistoryPredictor())


def test_every_combination_of_choices_comes_once_with_its_probability() -> None:
    def process(chooser: Chooser) -> tuple[int, int, int]:
        first = chooser.choose([0.2, 0.0, 0.8])
        return first, chooser.index(2 + first), chooser.weighted([1.0, 3.0])

    found = {way: p for p, way in enumerate_all(process)}
    expected = {
        (first, second, third): (0.2, 0.0, 0.8)[first] / (2 + first) * (0.25, 0.75)[third]
        for first in (0, 2)
        for second, third in itertools.product(range(2 + first), range(2))
    }
    assert found == pytest.approx(expected)


def test_values_and_gradients_are_those_of_the_table() -> None:
    assert WORLD.value((0,)) == 0.5 and WORLD.value((1,)) == 0.0
    assert WORLD.value(()) == pytest.approx(0.25 * (0.25 + 0.5) + 0.75 * 0.5)
    step = 1e-6
    for action, slope in enumerate(WORLD.gradient(())):  # softmax of logits, moved by hand
        raised = [p * (1 + step * (a == action)) for a, p in enumerate(WORLD.policy[()])]
        moved = World({**WORLD.policy, (): tuple(p / sum(raised) for p in raised)}, WORLD.rewards)
        assert (moved.value(()) - WORLD.value(())) / step == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("rule", [RuleConfig(), RandomRuleConfig(chains=1, expansions=2)])
def test_all_ways_to_grow_a_tree_have_probability_one_and_no_two_are_alike(
    rule: RuleConfig, lockstep: bool
) -> None:
    grown = forest(rule, 3)
    ways: Counter[tuple[tuple[tuple[int, ...], int], ...]] = Counter()
    total = 0.0
    for probability, (tree, _) in enumerate_all(lambda c: grow(grown, WORLD, c, lockstep=lockstep)):
        total += probability
        ways[tuple((history(tree, node.index), node.lease) for node in tree.nodes)] += 1
    assert total == pytest.approx(1.0)
    if rule.name == "flat":
        assert set(ways.values()) == {1} and len(ways) == 3**3


def test_the_mean_outcome_of_flat_continuations_is_the_value_of_the_prompt() -> None:
    grown = forest(RuleConfig(), 2)

    def mean(tree: Tree) -> float:
        return sum(c.outcome.reward for c in tree.leaves() if c.outcome is not None) / 2

    expected = sum(
        p * mean(t) for p, (t, _) in enumerate_all(lambda c: grow(grown, WORLD, c, lockstep=False))
    )
    assert expected == pytest.approx(WORLD.value(()))
