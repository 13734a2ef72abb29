"""Which tree decides next, how near to its bound, and what is remembered between decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from allocator.budgets.base import Prompt
from allocator.hindsight import Hindsight
from allocator.rules.base import COMPLETE, Decision, EventKind, Pick, Rule, TreeView
from allocator.settings import Settings
from allocator.tree import GrowingTree
from benchmarks.fleet import Fleet, FleetConfig
from common.config_allocator import BudgetConfig, RuleConfig, UucbRuleConfig
from common.messages import Message
from common.nouns import ROOT, Lease
from common.prefix import describe
from tests.allocator.harness import Rig, small


class OneMore(Rule):
    """One continuation after the other from the prompt, with an eye on the outcomes."""

    name = "one_more"
    reads = frozenset({EventKind.OUTCOME})

    def decide(self, view: TreeView) -> Decision:
        return Decision(picks=(Pick(ROOT),)) if view.budget_left else COMPLETE


def rig(staleness: int, *, trees: int, rule: Rule | RuleConfig | None = None, continuations: int = 40) -> Rig:
    bounds = small(steps=1, batch_trees=trees, max_score_staleness=staleness)
    made = Rig(bounds, rule or OneMore(), continuations)
    made.learner()
    return made


def work(made: Rig, *actors: str) -> list[Lease]:
    """Set up all trees that are opened; returns the leases granted by then."""
    leases: list[Lease] = []
    for _ in range(20):
        for actor in actors:
            made.inspect(actor)
            leases += made.leases(actor)
    return leases


def by_tree(leases: list[Lease]) -> dict[int, int]:
    return dict(Counter(lease.id.tree for lease in leases))


def one_slot_after_the_other(made: Rig, slots: range) -> list[Lease]:
    """Room comes up slot by slot, as it does where leases end one by one."""
    return [lease for number in slots for lease in work(made, made.actor(f"a{number}/1", slots=1))]


def test_a_new_tree_is_opened_before_anything_is_decided_that_does_not_know_what_is_outstanding() -> None:
    made = rig(30, trees=3)
    assert by_tree(one_slot_after_the_other(made, range(3))) == {0: 1, 1: 1, 2: 1}


def test_where_no_tree_may_be_opened_slots_spread_over_the_trees_there_are() -> None:
    made = rig(30, trees=3)
    leases = one_slot_after_the_other(made, range(3))
    for row in range(1, 4):
        leases += one_slot_after_the_other(made, range(3 * row, 3 * row + 3))
        assert by_tree(leases) == {0: row + 1, 1: row + 1, 2: row + 1}


def test_nothing_is_decided_speculatively_for_an_actor_to_hold_until_a_slot_is_free() -> None:
    made = rig(30, trees=1)
    actor = made.actor(slots=3, prefetch=10)
    held = work(made, actor)
    assert len(held) == 3
    made.finish(actor, held[0])
    assert len(made.leases(actor)) == 1
    flat = rig(30, trees=1, rule=RuleConfig())
    assert len(work(flat, flat.actor(slots=3, prefetch=10))) == 13, "what cannot grow old may wait there"


def test_for_a_rule_that_reads_nothing_old_trees_finish_before_new_ones_start() -> None:
    made = rig(0, trees=3, rule=RuleConfig(), continuations=3)
    assert by_tree(work(made, made.actor("a/1", slots=3))) == {0: 3}


@pytest.mark.parametrize(
    ("staleness", "leases"), [(0, 1), (1, 2), (4, 5), (7, 8), (8, 8), (16, 15), (32, 29)]
)
def test_an_eighth_of_the_bound_is_left_for_what_happens_until_a_lease_starts(
    staleness: int, leases: int
) -> None:
    """One event for each that is outstanding: at most D of them, less what is left free, and the newest."""
    made = rig(staleness, trees=1)
    assert len(work(made, made.actor(slots=40))) == leases


def test_with_some_room_to_the_bound_leases_are_young_enough_when_they_start() -> None:
    made = rig(16, trees=1)
    actor = made.actor(slots=40)
    early, *rest = work(made, actor)
    made.finish(actor, early)
    for lease in rest:
        made.start(actor, lease)
    assert made.stat("events/too_old") == 0 and made.stat("leases/revoked") == 0


class Watching(Fleet):
    """Compares what is remembered with what is so, after every event."""

    most = 0

    def heard(self, key: str, message: Message, ack: bool, records: list[Any]) -> None:
        forest = self.core.state.forest
        assert len(forest.wanting) <= 4 * len(forest.trees) + 65, "outdated entries are cleared away"
        self.most = max(self.most, len(forest.wanting))


class Remembered:
    """At every decision: predictions are those of the newest predictor, with and without the news."""

    looked = 0

    def admitted(self, prompt: Prompt) -> None: ...

    def allowed(self, allowances: Mapping[int, int]) -> None: ...

    def deciding(self, tree: GrowingTree, decision: Decision) -> None:
        past = Hindsight(tree, tree.news)
        for index in tree.anchors():
            for view in (tree, past):
                prefix = describe(tree.nodes[index], view.tally(ROOT), view.tally(index))
                assert view.predict(index) == tree.predictor.predict(prefix)
            self.looked += 1


def test_what_is_remembered_of_trees_and_predictions_is_what_is_so() -> None:
    bounds = Settings(
        steps=60, batch_trees=4, max_policy_lag=1, max_score_staleness=9, lease_deadline_s=100.0
    )
    shape = FleetConfig(actors=4, slots=6, prefetch=0, step_s=0.1, commit_every=2)
    simulation = Watching(bounds, shape, UucbRuleConfig(), BudgetConfig(continuations=24), seed=4)
    simulation.core.state.forest.watch = remembered = Remembered()
    simulation.run(max_events=6_000)
    assert simulation.most > 0 and remembered.looked > 1_000
