"""`Hindsight` shows the tree as it would be, and the counters say what newly arrived outcomes were good for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.hindsight import Hindsight
from allocator.rules.base import WAIT, Pick, Rule, TreeView
from allocator.rules.entropy import EntropyRule
from allocator.rules.trace import TraceRule
from allocator.rules.uucb import UucbRule
from allocator.tree import GrowingTree
from common.config_allocator import EntropyRuleConfig, TraceRuleConfig, UucbRuleConfig
from common.nouns import ROOT, RewardSource
from tests.allocator.harness import granted, small
from tests.allocator.rules.garden import Garden, Hopeful, World, step

RULES: list[Rule] = [
    UucbRule(UucbRuleConfig(initial=1, potential="contrast")),
    UucbRule(UucbRuleConfig(initial=1)),
    TraceRule(TraceRuleConfig(per_root=1)),
    EntropyRule(EntropyRuleConfig(initial=1, weight=2.0, vocabulary=20)),
    EntropyRule(EntropyRuleConfig(form="at2po", initial=1, beam=2)),
]
SOURCES = [RewardSource.ENVIRONMENT, RewardSource.ENVIRONMENT, RewardSource.PSEUDO_REWARD]


def two_histories(seed: int) -> tuple[GrowingTree, GrowingTree, set[int]]:
    """The same tree twice, but in the second one some of the newest outcomes never came; and which."""
    rng, world = random.Random(seed), World(seed)
    gardens = [Garden(RULES[0], 20, predictor=Hopeful()) for _ in range(2)]
    late: set[int] = set()
    decisions = rng.randint(1, 4)
    for round_ in range(1, decisions + 1):
        picks = [
            Pick(rng.choice(gardens[0].tree.anchors()), group=round_ - 1) for _ in range(rng.randint(1, 3))
        ]
        for garden in gardens:
            garden.grow(*picks)
        for _ in range(rng.randint(0, 25)):
            running = [
                b.number for b in gardens[1].tree.branches.values() if not b.ended and b.number not in late
            ]
            if running:
                advance(rng, world, gardens, rng.choice(running), late if round_ == decisions else None)
    return gardens[0].tree, gardens[1].tree, late


def advance(
    rng: random.Random, world: World, gardens: list[Garden], number: int, late: set[int] | None
) -> None:
    """One message about a continuation; its outcome may be one that only the first tree gets."""
    branch = gardens[0].tree.branches[number]
    if len(branch.nodes) != world.length(number):
        for garden in gardens:
            step(garden, world, garden.tree.branches[number])
        return
    reward, source = rng.choice([0.0, 1.0, 0.25]), rng.choice(SOURCES)
    hidden = late is not None and rng.random() < 0.6
    if late is not None and hidden:
        late.add(number)
    for garden in gardens[: 1 if hidden else 2]:
        garden.end(garden.tree.branches[number], reward, source)


def everything(view: TreeView, nodes: int) -> dict[str, object]:
    """All that a rule may ask."""
    draws = view.draws()
    return {
        "itself": (view.id, view.wave, view.allowance, view.budget_left),
        "branches": [
            (key, b.number, b.group, b.anchor, list(b.nodes), b.outcome, b.ended)
            for key, b in view.branches.items()
        ],
        "anchors": view.anchors(),
        "nodes": [view.node(i) for i in range(nodes)],
        "in flight": [view.in_flight(i) for i in range(nodes)],
        "tallies": [view.tally(i) for i in range(nodes)],
        "predictions": [view.predict(i) for i in range(nodes)],
        "draws": [draws.index(1000), draws.weighted([1.0, 2.0, 3.0])],
    }


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9))
def test_it_equals_the_tree_that_truly_did_not_get_those_outcomes(seed: int) -> None:
    tree, truly, late = two_histories(seed)
    assert everything(Hindsight(tree, late), len(tree.nodes)) == everything(truly, len(truly.nodes))
    for rule in RULES:
        assert rule.decide(Hindsight(tree, late)) == rule.decide(truly)
    assert everything(Hindsight(tree, ()), len(tree.nodes)) == everything(tree, len(tree.nodes))


def test_the_histories_are_ones_where_hiding_shows() -> None:
    found = [two_histories(seed) for seed in range(150)]
    assert sum(len(late) > 1 for _, _, late in found) > 20
    assert sum(tree.tally(ROOT) != truly.tally(ROOT) for tree, truly, late in found) > 20
    assert sum(RULES[0].decide(tree) != RULES[0].decide(truly) for tree, truly, _ in found) > 5


# -------------------------------------------------------------------------------------------- what news do


def counted(garden: Garden) -> tuple[int, int]:
    return garden.forest.changed, garden.forest.unlocked


def test_a_decision_counts_as_changed_only_where_the_news_made_it_another() -> None:
    """`uucb` by hand. With the first continuation on its way (V at the prompt is one half), each outcome is as
    likely to be missing, and the deepest turn has most prefixes to serve. Once it failed, a success is what is
    missing, and the turn before, with V = 0.9, is the place to look for it."""
    rule = UucbRule(UucbRuleConfig(initial=1, potential="contrast", exploration=0.0, entropy=0.0))
    garden = Garden(rule, 6)
    _, (first,) = garden.forest.decide(garden.tree)
    likely = garden.turn(first, 0.9)
    unlikely = garden.turn(first, 0.1)
    assert garden.decide().picks == (Pick(unlikely),)
    garden.turn(first, last=True)
    garden.end(first, 0.0)
    assert counted(garden) == (0, 0), "news alone change nothing"
    decision, (second,) = garden.forest.decide(garden.tree)
    assert decision.picks == (Pick(likely),) and counted(garden) == (1, 0)

    garden.turn(second, last=True)
    garden.end(second, 0.0)
    decision, (third,) = garden.forest.decide(garden.tree)
    assert decision.picks == (Pick(likely),) and counted(garden) == (1, 0), (
        "the same without that second failure"
    )

    garden.turn(third, last=True)
    garden.end(third, 1.0)
    decision, _ = garden.forest.decide(garden.tree)
    assert decision.picks == (Pick(unlikely),), (
        "both outcomes are there but below it, where a success is missing"
    )
    assert counted(garden) == (2, 0) and not garden.tree.news
    garden.forest.decide(garden.tree)
    assert counted(garden) == (2, 0), "no outcome came in between: there is nothing to compare with"


def test_a_decision_that_had_to_wait_for_the_news_counts_as_unlocked() -> None:
    one = small(batch_trees=1, steps=1)
    rig, actor, (first, second) = granted(one, TraceRuleConfig(), continuations=6, slots=8)
    rig.finish(actor, first, 3, reward=1.0)
    assert not rig.leases(actor)
    rig.finish(actor, second, 3, reward=0.0)
    assert len(rig.leases(actor)) == 4
    assert rig.stat("decisions/unlocked_by_news") == 1 and rig.stat("decisions/changed_by_news") == 0


@pytest.mark.parametrize("form", ["arpo", "at2po"])
def test_a_rule_that_reads_no_outcomes_is_not_asked_twice(form: str) -> None:
    garden = Garden(EntropyRule(EntropyRuleConfig(form=form, initial=2)), 8)
    _, branches = garden.forest.decide(garden.tree)
    for branch in branches:
        garden.turn(branch, entropies=[1.0])
        garden.turn(branch, entropies=[1.0], last=True)
        garden.end(branch, 1.0)
    decision, _ = garden.forest.decide(garden.tree)
    assert decision != WAIT and counted(garden) == (0, 0)
