"""The core by hand: one message at a time, the conservation law checked after each."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import (
    Bye,
    Declined,
    Expanded,
    Failed,
    Finished,
    HorizonReached,
    Inspect,
    Inspected,
    InspectFailed,
    Message,
    Revoke,
    Starting,
    TreeReady,
)
from common.nouns import LeaseId, TurnStatus, Version
from common.seeds import lease_seed
from tests.allocator.harness import LEARNER, ROOT, Rig, granted, ready, small, turn, win

# ------------------------------------------------------------------------------------------ growing a tree


def test_work_is_granted_within_one_tick_of_a_hello() -> None:
    rig, actor = ready()
    rig.inspect(actor)
    assert rig.leases(actor)


def test_a_lease_carries_all_that_is_fixed_at_grant() -> None:
    _, _, leases = granted()
    lease = leases[0]
    assert (lease.prefix, lease.snapshot, lease.history, lease.state_hash) == (
        ROOT.observation, b"root", [], "root",
    )  # fmt: skip
    assert (lease.depth, lease.offset, lease.horizon, lease.anchor) == (0, 0, 0, 0)
    assert lease.seed == lease_seed(0, lease.id.tree, lease.id.number)
    assert (lease.weight, lease.baseline, lease.predictor_version) == (0.5, 0.5, 0)
    assert lease.min_version == Version(0, 0) and lease.id.epoch == 0


def test_where_there_is_no_snapshot_the_lease_carries_the_history_that_replays_to_its_place() -> None:
    rig, actor = ready()
    for message in rig.take(actor, Inspect):
        rig.say(actor, Inspected(message.tree, message.task, msgspec.structs.replace(ROOT, snapshot=None)))
    lease = rig.leases(actor)[0]
    rig.start(actor, lease)
    turns = [msgspec.structs.replace(turn(lease, k), snapshot=None) for k in range(2)]
    for offset, sampled in enumerate(turns):
        rig.say(actor, Expanded(lease.id, offset, sampled))
    rig.say(actor, Failed(lease.id, "drill", True))
    (again,) = rig.leases(actor)
    assert [(s.action, s.seed) for s in again.history] == [(t.action_text, t.seed) for t in turns]
    assert again.prefix == ROOT.observation + b"".join(t.action + t.observation for t in turns)
    assert (again.offset, again.depth, again.id.epoch) == (2, 2, 1)


def test_a_finished_tree_is_delivered_in_canonical_order_whoever_was_first() -> None:
    trees = []
    for order in ((0, 1), (1, 0)):
        rig, actor, leases = granted()
        pair = [leases[i] for i in order]
        for lease in pair:
            rig.start(actor, lease)
        for lease in pair:
            rig.expand(actor, lease, 0)
        for lease in reversed(pair):
            rig.expand(actor, lease, 1, last=True)
            rig.say(actor, Finished(lease.id, 2, win()))
        trees.append(rig.take(LEARNER, TreeReady)[0].tree)
    assert trees[0] == trees[1]
    assert [(n.lease, n.offset, n.parent) for n in trees[0].nodes] == [
        (-1, 0, -1), (0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 3),
    ]  # fmt: skip
    assert [n.value for n in trees[0].nodes] == [0.5, 0.5, None, 0.5, None]
    assert [c.nodes for c in trees[0].continuations] == [[1, 2], [3, 4]]
    assert trees[0].planned_weight == 1.0


@pytest.mark.parametrize("copies", [1, 3])
def test_repeats_are_acknowledged_and_change_nothing(copies: int) -> None:
    rig, actor, leases = granted()
    for lease in leases[:2]:
        said = [Starting(lease.id, Version(0, 0)), Expanded(lease.id, 0, turn(lease, 0, True))]
        for message in [*said, Finished(lease.id, 1, win())]:
            assert all(rig.say(actor, message).ack for _ in range(copies))
        assert all(rig.say(actor, m).ack for m in said)
    (tree,) = rig.take(LEARNER, TreeReady)
    assert len(tree.tree.nodes) == 3 and rig.stat("leases/finished") == 2


def test_a_turn_or_an_end_that_comes_before_what_precedes_it_is_not_acknowledged() -> None:
    rig, actor, (lease, *_) = granted()
    assert not rig.expand(actor, lease, 0).ack  # Starting is missing
    assert not rig.say(actor, Finished(lease.id, 1, win())).ack
    rig.start(actor, lease)
    assert not rig.expand(actor, lease, 1).ack
    assert not rig.say(actor, Finished(lease.id, 1, win())).ack
    assert rig.expand(actor, lease, 0, last=True).ack
    assert rig.say(actor, Finished(lease.id, 1, win())).ack
    assert rig.stat("events/gaps") == 4


@pytest.mark.parametrize(
    "message",
    [
        Finished(LeaseId(0, 0, 0), 0, win()),
        HorizonReached(LeaseId(0, 0, 0), 1),
        Expanded(LeaseId(0, 0, 0), 1, ROOT),
        Finished(LeaseId(9, 0, 0), 1, win()),
        Finished(LeaseId(0, 0, 7), 1, win()),
    ],
    ids=["an end without turns", "no horizon", "a turn after the last", "no such tree", "a future epoch"],
)
def test_what_cannot_be_is_counted_and_has_no_effect(message: Message) -> None:
    rig, actor, (lease, *_) = granted()
    rig.start(actor, lease)
    rig.expand(actor, lease, 0, last=True)
    before = rig.core.stats()
    assert rig.say(actor, message).ack
    assert rig.core.stats() == {**before, "events/invalid": 1.0}


def test_an_actor_cannot_report_about_the_lease_of_another() -> None:
    rig, actor, leases = granted()
    other = rig.actor("b/1")
    rig.start(actor, leases[0])
    rig.expand(other, leases[0], 0)
    assert rig.stat("events/fenced") == 1
    assert rig.core.state.forest.trees[0].branches[0].nodes == []


def test_a_failure_is_never_an_outcome_and_its_retry_resumes_behind_the_accepted_turns() -> None:
    rig, actor, leases = granted()
    rig.start(actor, leases[0])
    rig.expand(actor, leases[0], 0)
    rig.say(actor, Failed(leases[0].id, "env", True, discarded_tokens=3))
    (again,) = rig.leases(actor)
    assert again.id == LeaseId(0, 0, 1) and again.offset == 1 and again.seed == leases[0].seed
    assert (again.weight, again.baseline, again.score_stamp) == (leases[0].weight, leases[0].baseline, 0)
    rig.finish(actor, again, turns=3)
    rig.finish(actor, leases[1])
    (tree,) = rig.take(LEARNER, TreeReady)
    assert [len(c.nodes) for c in tree.tree.continuations] == [3, 2]
    assert rig.stat("events/discarded_tokens") == 3


def test_after_too_many_failures_a_continuation_is_dropped_but_stays_in_the_denominator() -> None:
    rig, actor, leases = granted()
    lease = leases[0]
    for _ in range(3):
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "poison", True))
        lease = next(iter(rig.leases(actor)), lease)
    rig.finish(actor, leases[1])
    (tree,) = rig.take(LEARNER, TreeReady)
    first = tree.tree.continuations[0]
    assert first.outcome is None and first.ended == "dropped: poison" and first.weight == 0.5
    assert tree.tree.planned_weight == 1.0
    assert (rig.stat("leases/failed"), rig.stat("leases/dropped")) == (2, 1)


def test_a_tree_without_any_outcome_is_dropped_and_its_place_goes_to_another() -> None:
    rig, actor, leases = granted()
    for lease in leases[:2]:
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "broken", False))
    assert rig.stat("trees/dropped/no_outcome") == 1 and rig.stat("trees/opened") == 3
    assert [m.tree for m in rig.take(actor, Inspect)] == [2]
    assert rig.core.state.forest.trees[2].wave == 0


def test_a_declined_lease_goes_elsewhere_and_its_actor_rests_for_a_heartbeat() -> None:
    rig, actor, leases = granted()
    other = rig.actor("b/1")
    rig.say(actor, Declined(leases[0].id, "no weights"))
    (again,) = rig.leases(other)
    assert again.id == LeaseId(0, 0, 1)
    rig.say(other, Declined(again.id, "no weights"))
    assert not rig.leases(actor) and not rig.leases(other)  # no ping-pong at the speed of messages
    rig.tick(1.1)
    assert len(rig.leases(actor) + rig.leases(other)) == 1


def test_an_end_that_only_a_dead_attempt_had_delivered_all_turns_of_is_taken_from_the_next() -> None:
    rig, actor, leases = granted()
    rig.start(actor, leases[0])
    rig.expand(actor, leases[0], 0, last=True)
    new = rig.actor("a/2")
    again = next(lease for lease in rig.leases(new) if lease.id.number == 0 and lease.id.tree == 0)
    assert again.offset == 1 and again.snapshot is None and len(again.history) == 1
    assert rig.say(new, Finished(again.id, 1, win())).ack
    assert rig.stat("leases/finished") == 1


# --------------------------------------------------------------------------------------- deadlines, deaths


def test_heartbeats_renew_no_lease_but_turns_do() -> None:
    rig, actor, leases = granted()
    for lease in leases:
        rig.start(actor, lease)
    for offset in range(4):
        rig.expand(actor, leases[0], offset)
        rig.live(10)
    assert rig.stat("leases/expired") == 3
    assert {r.lease.number for r in rig.take(actor, Revoke)} <= {0, 1}
    assert rig.core.state.forest.trees[0].branches[0].live


def test_a_queued_lease_does_not_expire_while_its_actor_gets_on_with_others() -> None:
    rig, actor, leases = granted(slots=1, prefetch=3)
    assert len(leases) == 4
    rig.start(actor, leases[0])
    for offset in range(5):
        rig.live(20)
        rig.expand(actor, leases[0], offset)
    assert rig.stat("leases/expired") == 0
    rig.live(31)
    assert rig.stat("leases/expired") == 4  # a hung actor loses what it runs and what it queues


def test_the_slot_of_a_lease_that_was_taken_back_stays_taken_until_its_actor_says_so() -> None:
    rig, actor, leases = granted()
    for lease in leases:
        rig.start(actor, lease)
    rig.live(31)
    assert not rig.leases(actor) and rig.stat("peers/room") == 0
    rig.say(actor, Failed(leases[0].id, "revoked", False))
    assert len(rig.leases(actor)) == 1


def test_trees_being_set_up_by_an_actor_that_dies_or_fails_are_set_up_elsewhere() -> None:
    rig, actor = ready()
    first = rig.take(actor, Inspect)
    other = rig.actor("b/1")
    rig.say(actor, InspectFailed(first[0].tree, "no"))
    assert [m.tree for m in rig.take(other, Inspect)] == [first[0].tree]
    rig.say(actor, Bye(0, "leaving"))
    assert {m.tree for m in rig.take(other, Inspect)} == {m.tree for m in first[1:]}


def test_a_task_that_cannot_be_set_up_anywhere_is_dropped_with_a_reason() -> None:
    rig, actor = ready()
    for _ in range(3):
        for message in rig.take(actor, Inspect):
            if message.tree == 0:
                rig.say(actor, InspectFailed(0, "broken map"))
    assert rig.stat("trees/dropped/inspect_failed") == 1


def test_an_inspection_without_an_answer_is_repeated_and_a_late_answer_ignored() -> None:
    rig, actor = ready()
    first = rig.take(actor, Inspect)
    rig.live(31)
    again = rig.take(actor, Inspect)
    assert {m.tree for m in again} == {m.tree for m in first}
    for message in [*again, *first]:
        assert rig.say(actor, Inspected(message.tree, message.task, ROOT)).ack
    assert rig.stat("events/duplicates") == len(first)


# ------------------------------------------------------------------------------------------- what it tells


def test_what_the_allocator_waits_for_has_a_name() -> None:
    rig = Rig(small(batch_trees=1))
    assert rig.core.waiting() == "learner"
    rig.learner(credit=0)
    assert rig.core.waiting() == "actors"
    actor = rig.actor(slots=2)
    rig.inspect(actor)
    assert rig.core.waiting() == "working"
    rig.work(actor)
    assert rig.core.waiting() == "credit"


def test_an_open_anchor_is_one_that_did_not_end_the_world() -> None:
    rig, actor, (lease, *_) = granted()
    rig.start(actor, lease)
    rig.expand(actor, lease, 0)
    rig.expand(actor, lease, 1, last=True)
    tree = rig.core.state.forest.trees[lease.id.tree]
    assert tree.anchors() == [0, 1]
    assert tree.nodes[2].turn.status is TurnStatus.TERMINATED
    assert tree.in_flight(0) == 2
