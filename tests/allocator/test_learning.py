"""The learner's side, by hand: how many trees it is sent, and which of them again."""

from __future__ import annotations

from common.messages import Committed, Consumed, Credit, Dropped, Inspect, TreeReady
from common.nouns import Version
from tests.allocator.harness import LEARNER, Rig, ready, small


def test_no_more_trees_are_opened_than_the_learner_can_train_in_time() -> None:
    rig, actor = ready(small(steps=3, batch_trees=2, max_policy_lag=0), slots=64)
    rig.work(actor)
    assert rig.stat("trees/opened") == 2 and rig.core.waiting() == "work_ahead"
    rig.consume([0, 1], step=1)
    assert rig.stat("trees/opened") == 4
    rig.work(actor)
    rig.consume([2, 3], step=2)
    rig.work(actor)
    rig.consume([4, 5], step=3)
    rig.work(actor)
    assert rig.stat("trees/opened") == 6  # steps x batch, not one more


def test_a_dropped_tree_leaves_the_sum_at_once() -> None:
    rig, actor = ready()
    rig.work(actor)
    rig.say(LEARNER, Dropped(0, "stale"))
    assert rig.stat("trees/dropped/stale") == 1
    assert [m.tree for m in rig.take(actor, Inspect)] == [2]


def test_trees_are_delivered_within_the_credit_and_a_repeated_credit_adds_nothing() -> None:
    rig = Rig(small(batch_trees=4))
    rig.learner(credit=1)
    actor = rig.actor(slots=64)
    rig.work(actor)
    assert [m.tree.id for m in rig.take(LEARNER, TreeReady)] == [0] and rig.core.waiting() == "credit"
    rig.say(LEARNER, Credit(1))
    assert not rig.take(LEARNER, TreeReady)
    rig.say(LEARNER, Credit(3))
    rig.say(LEARNER, Credit(3))
    assert [m.tree.id for m in rig.take(LEARNER, TreeReady)] == [1, 2]


def test_a_new_learner_incarnation_gets_again_what_its_checkpoint_does_not_hold() -> None:
    rig, actor = ready(small(steps=4, batch_trees=2, max_policy_lag=2), slots=64)
    rig.work(actor)
    rig.consume([0, 1], step=1)
    rig.say(LEARNER, Committed(Version(0, 1), [0, 1]))
    rig.consume([2, 3], step=2)
    rig.consume([4, 5], step=3)
    rig.work(actor)
    rig.take(LEARNER, TreeReady)
    new = rig.learner(step=2, lineage=1, incarnation="2")  # its checkpoint of step 2 was saved, not announced
    assert [m.tree.id for m in rig.take(new, TreeReady)] == [4, 5, 6, 7]
    assert rig.stat("trees/committed") == 4
    assert not rig.say(LEARNER, Consumed([4], Version(0, 4))).ack  # the old one is not heard any more
    assert rig.stat("work/step") == 2


def test_trees_of_a_checkpoint_that_was_lost_are_replaced_by_others() -> None:
    rig, actor = ready(small(steps=2, batch_trees=2, max_policy_lag=1), slots=64)
    rig.work(actor)
    rig.consume([0, 1], step=1)
    rig.say(LEARNER, Committed(Version(0, 1), [0, 1]))
    rig.learner(step=0, lineage=1, incarnation="2")
    assert rig.stat("trees/dropped/checkpoint_lost") == 2 and rig.stat("trees/committed") == 0
    assert rig.stat("trees/opened") == 6


def test_consumed_of_another_lineage_moves_nothing() -> None:
    rig, actor = ready()
    rig.work(actor)
    rig.say(LEARNER, Consumed([0, 1], Version(3, 9)))
    assert rig.stat("work/step") == 0 and rig.stat("trees/consumed") == 0
