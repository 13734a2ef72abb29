"""A little more for uniform trees: within the cap at any moment, and the same trees whoever was done first."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.budgets.adaptive import ANYBODY, NOBODY, AdaptiveBudget
from allocator.budgets.rescue import Row, describe_uniform
from allocator.rules.base import COMPLETE, Decision, TreeView
from allocator.rules.random import RandomRule
from common.config_allocator import AdaptiveConfig, RuleConfig
from common.messages import Committed, Dropped, Inspect, Inspected, InspectFailed, TreeReady
from common.nouns import Version
from tests.allocator.budgets.grove import Grove
from tests.allocator.harness import LEARNER, ROOT, ready, small
from tests.allocator.test_sequential import Crowd

BATCH, G = 4, 3


class Noted(AdaptiveBudget):
    """Writes down what it was asked, and what stood then: enough to decide it all again, plainly."""

    def __init__(
        self, overhead: float = 0.3, extra: int = 2, continuations: int = G, batch: int = BATCH
    ) -> None:
        super().__init__(AdaptiveConfig(continuations=continuations, overhead=overhead, extra=extra), batch)
        self.asked: dict[int, tuple[Row | None, float, float]] = {}
        """By slot: features, score and τ, when the first tree there was done."""
        self.parked = 0
        self.credits: list[int] = []
        """After each wave."""

    def extra(self, view: TreeView) -> int | None:
        slot = self._slots[view.id]
        if not self._is_decided(slot) and slot not in self.asked:
            row = describe_uniform(view)
            self.asked[slot] = row, self.model.score(row) if row else 0.0, self.threshold
        answer = super().extra(view)
        self.parked += answer is None
        return answer

    def wave_done(self, wave: int) -> None:
        super().wave_done(wave)
        self.credits.append(self._credit())


def within_the_cap(overhead: float) -> Any:
    """Extra continuations never exceed their share of the regular ones in waves that are complete."""

    def check(grove: Grove) -> None:
        regular = sum(grove.regular.get(wave, 0) for wave in range(grove.waves.next))
        assert grove.extra_granted <= overhead * regular, f"{grove.extra_granted} of {regular}"

    return check


def decided_plainly(budget: Noted, waves: int) -> set[int]:
    """Slots that get more, one after the other: in doubt, hopeful enough, and paid for."""
    got: set[int] = set()
    for wave in range(1, waves):
        credit = budget.credits[wave - 1]
        for slot in range(wave * budget._batch, (wave + 1) * budget._batch):
            row, score, threshold = budget.asked.get(slot, (None, 0.0, NOBODY))
            if row is not None and score >= threshold and credit >= budget._extra:
                credit -= budget._extra
                got.add(slot)
    return got


def granted(grove: Grove) -> set[int]:
    return {slot for slot, there in grove.allowances.items() if max(there) > grove.budget.typical}


# ------------------------------------------------------------------------------------------- cap and order


@given(
    seed=st.integers(0, 10_000), order=st.integers(0, 10_000), overhead=st.sampled_from([0.05, 0.2, 0.45, 1.0]),
    extra=st.integers(1, 4), dropped=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_same_trees_get_more_whoever_is_done_first_and_never_more_than_the_cap(
    seed: int, order: int, overhead: float, extra: int, dropped: float
) -> None:
    grown = []
    for each in (None, order):
        budget = Noted(overhead, extra)
        grove = Grove(budget, BATCH, seed, each, dropped=dropped, check=within_the_cap(overhead))
        grown.append(grove.run(6))
        assert granted(grove) == decided_plainly(budget, 6)
        assert not grove.forest.parked
    one, other = grown
    assert one.allowances == other.allowances and one.told == other.told
    assert one.budget.to_state() == other.budget.to_state()


def test_the_orders_that_were_tried_do_park_refuse_and_rescue() -> None:
    """Otherwise the test above would prove little."""
    seen: dict[str, float] = {"parked": 0, "given": 0}
    for seed in range(12):
        budget = Noted(0.3)
        seen["given"] += len(granted(Grove(budget, BATCH, seed, seed).run(6)))
        seen["parked"] += budget.parked
        for name, value in budget.stats().items():
            seen[name] = seen.get(name, 0) + value
    for name in ("parked", "given", "refused_by_cap", "attempts", "rescued", "uniform"):
        assert seen[name] > 3, name
    assert seen["rescued"] < seen["attempts"] == seen["given"]


@given(seed=st.integers(0, 10_000), lag=st.integers(1, 2), overhead=st.sampled_from([0.1, 0.45, 1.0]))
@settings(max_examples=25, deadline=None)
def test_waves_that_overlap_stay_within_the_cap_and_come_to_their_end(
    seed: int, lag: int, overhead: float
) -> None:
    budget = Noted(overhead)
    grove = Grove(budget, BATCH, seed, seed, lag=lag, dropped=0.2, check=within_the_cap(overhead)).run(6)
    assert sorted(grove.allowances) == list(range(24)) and not grove.forest.parked


def test_a_cap_of_five_in_a_hundred_is_nearly_spent_over_a_long_run() -> None:
    budget = Noted(0.05, extra=1, batch=8)
    grove = Grove(budget, 8, seed=1, order=2, check=within_the_cap(0.05)).run(40)
    regular = 40 * 8 * G
    assert 0.8 * 0.05 * regular <= grove.extra_granted <= 0.05 * regular
    stats = budget.stats()
    assert stats["overhead"] == grove.extra_granted / regular and stats["attempts"] == stats["extra"]
    assert stats["credit"] == math.floor(0.05 * regular) - grove.extra_granted
    assert stats["mixed_after"] - stats["mixed_before"] == pytest.approx(stats["rescued"] / 320)


def test_the_first_wave_gets_nothing_and_no_overhead_gives_nothing_at_all() -> None:
    assert granted(Grove(Noted(1.0), BATCH, 3, 3).run(1)) == set()
    assert granted(Grove(Noted(0.0), BATCH, 3, 3).run(5)) == set()


def test_many_trees_in_flight_equal_one_after_the_other_in_the_whole_core() -> None:
    """Actors that fail and die, all waves; turns, seeds, weights and baselines too."""
    grown = []
    for seed, faults in ((0, 0.0), (1, 0.0), (2, 0.15), (3, 0.15), (4, 0.15)):
        budget = Noted(0.5, continuations=2)
        grown.append(Crowd(RuleConfig(), budget, seed, faults).grow())
    assert all(trees == grown[0] for trees in grown)
    assert {len(tree.continuations) for tree in grown[0]} == {2, 4}
    assert {tree.planned_weight for tree in grown[0]} == {1.0, 2.0}


# ----------------------------------------------------------------------------------------------- one tree


def test_what_replaces_a_tree_that_had_its_say_gets_no_more() -> None:
    """A wave of two; whatever was decided for a place stays decided."""
    budget = Noted(1.0, continuations=2, batch=2)
    run, actor = ready(small(steps=3), continuations=budget, slots=32)
    run.work(actor)  # all continuations of the rig succeed: uniform
    run.consume([m.tree.id for m in run.take(LEARNER, TreeReady)], 1)
    run.work(actor)
    trees = [m.tree for m in run.take(LEARNER, TreeReady)]
    assert [len(tree.continuations) for tree in trees] == [4, 4] and run.stat("budget/extra") == 4
    run.say(LEARNER, Dropped(trees[0].id, "stale"))
    run.work(actor)
    (again,) = [m.tree for m in run.take(LEARNER, TreeReady)]
    assert len(again.continuations) == 2 and again.planned_weight == 1.0


def test_a_place_whose_task_cannot_be_set_up_keeps_nobody_waiting() -> None:
    """The learner falls back, so that older places are filled before that one: what waited for it must not."""
    budget = Noted(0.5, continuations=2, batch=2)
    run, actor = ready(small(steps=3, max_attempts=1), continuations=budget, slots=32)
    run.work(actor)
    run.consume([m.tree.id for m in run.take(LEARNER, TreeReady)], 1)
    run.say(LEARNER, Committed(Version(0, 1), [0, 1]))
    low, high = run.take(actor, Inspect)
    run.say(actor, Inspected(high.tree, high.task, ROOT))
    for lease in run.leases(actor):
        run.finish(actor, lease)
    assert run.core.state.forest.trees[high.tree].parked, "credit for one, and the lower place has its say"
    run.learner(step=0, lineage=1, incarnation="2")
    assert run.stat("trees/dropped/checkpoint_lost") == 2 and not run.take(actor, Inspect)
    run.say(actor, InspectFailed(low.tree, "broken"))
    assert len(run.leases(actor)) == 2, "its share"
    (older,) = run.take(actor, Inspect)
    assert run.core.state.forest.trees[older.tree].slot == 0


def test_an_extra_continuation_weighs_as_much_as_a_regular_one() -> None:
    grove = Grove(Noted(1.0), BATCH, 5, 5).run(4)
    assert granted(grove) and grove.budget.weight(0) == 1 / G


def test_a_rule_that_leaves_budget_unused_is_given_no_more() -> None:
    class Frugal(RandomRule):
        """Two chains and no round."""

        def decide(self, view: TreeView) -> Any:
            return COMPLETE if len(view.branches) == 2 else super().decide(view)

    budget = Noted(1.0, continuations=6)
    grove = Grove(budget, BATCH, 7, 7, rule=Frugal(2, 2)).run(3)
    assert granted(grove) == set() and budget.stats()["regular"] == 2 * 3 * BATCH


def test_what_the_rule_did_not_start_is_paid_back_between_waves() -> None:
    class Half(RandomRule):
        """Starts one of what it is given beyond its six."""

        def decide(self, view: TreeView) -> Any:
            decision = COMPLETE if len(view.branches) > 6 else super().decide(view)
            return Decision(decision.picks[:1]) if len(view.branches) == 6 and decision.picks else decision

    budget = Noted(0.5, extra=2, continuations=6)
    grove = Grove(budget, BATCH, 8, 8, rule=Half(2, 2)).run(4)
    given = len(granted(grove))
    assert given > 0 and budget.stats()["extra"] == given
    assert budget.stats()["credit"] == 4 * BATCH * 6 // 2 - given


def test_action_tokens_are_accounted_by_who_sampled_them() -> None:
    grove = Grove(Noted(1.0), BATCH, 9, 9).run(4)
    account, stats = grove.forest.account, grove.budget.stats()
    counts = dict(grove.budget.to_state()["counts"])
    assert counts["regular_tokens"] + counts["extra_tokens"] == account["roots_tokens"]
    assert counts["regular"] == 4 * BATCH * G and counts["extra"] == grove.extra_granted > 0
    assert stats["overhead_tokens"] == counts["extra_tokens"] / counts["regular_tokens"] > 0


# ------------------------------------------------------------------------------------------- the threshold


def test_the_threshold_lets_through_as_many_as_can_be_paid() -> None:
    """Of the uniform trees of the last waves, so many a wave reach it as the credit pays for."""
    telling = 0
    for seed in range(8):
        budget = Noted(0.15)
        Grove(budget, BATCH, seed, seed).run(8)
        wanted = budget._credit() // budget._extra * len(budget._recent)
        scores = [budget.model.score(row) for rows in budget._recent for row in rows]
        if 0 < wanted < len(scores):
            telling += 1
            assert sum(score >= budget.threshold for score in scores) >= wanted
            assert sum(score > budget.threshold for score in scores) < wanted
    assert telling >= 3


def test_without_credit_nobody_passes_and_with_plenty_anybody_does() -> None:
    poor, rich = Noted(0.0), Noted(1.0)
    Grove(poor, BATCH, 12, 12).run(2)
    Grove(rich, BATCH, 12, 12).run(2)
    assert poor.threshold == NOBODY and rich.threshold == ANYBODY


# ------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize("waves", [1, 3])
def test_what_it_keeps_survives_as_plain_values(waves: int) -> None:
    kept, fresh = Noted(0.4), Noted(0.4)
    Grove(kept, BATCH, 13, 13).run(waves)
    fresh.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(kept.to_state())))
    assert fresh.to_state() == kept.to_state() and fresh.stats() == kept.stats()
    rows = [row for there in kept._recent for row in there]
    assert [fresh.model.score(row) for row in rows] == [kept.model.score(row) for row in rows]


def test_a_run_that_is_taken_up_in_the_middle_of_a_wave_goes_on_as_it_would_have() -> None:
    """After every event the budget is replaced by one that was read back."""

    def swap(grove: Grove) -> None:
        fresh = AdaptiveBudget(AdaptiveConfig(continuations=G, overhead=0.3, extra=2), BATCH)
        fresh.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(grove.budget.to_state())))
        grove.budget = grove.forest.budget = grove.waves.budget = fresh

    swapped = Grove(Noted(0.3), BATCH, 14, 14, dropped=0.2, check=swap).run(6)
    plain = Grove(Noted(0.3), BATCH, 14, 14, dropped=0.2).run(6)
    assert swapped.allowances == plain.allowances and granted(plain)
    assert swapped.budget.to_state() == plain.budget.to_state()
