"""Trees on their way, exhaustively for small cases, against a model made of sets."""

from __future__ import annotations

import itertools

import pytest

from allocator.delivery import Delivery
from common.messages import Expanded, Finished, Message, Starting, TreeReady
from common.nouns import Lease, Tree, Version
from tests.allocator.harness import LEARNER, Rig, ready, small, turn, win


def finished_tree() -> Tree:
    rig, actor = ready(small(batch_trees=1, steps=1))
    rig.work(actor)
    return rig.take(LEARNER, TreeReady)[0].tree


TREE = finished_tree()
ACTIONS = ("deliver", "consume", "commit", "drop", "back", "again")


class Sets:
    """What each action should do to one tree."""

    def __init__(self) -> None:
        self.state, self.step = "ready", -1

    def apply(self, action: str, version: int) -> None:
        match action, self.state:
            case "deliver", "ready":
                self.state = "delivered"
            case "consume", "ready" | "delivered":
                self.state, self.step = "consumed", version
            case "commit", "ready" | "delivered" | "consumed":
                self.step = self.step if self.state == "consumed" else version
                self.state = "committed"
            case "drop", "ready" | "delivered" | "consumed":
                self.state = "dropped"
            case (("back" | "again"), "delivered"):
                self.state = "ready"
            case "back", "consumed":
                self.state = "ready" if self.step > 0 else "committed"
            case "back", "committed" if self.step > 0:
                self.state = "dropped"
            case "again", "consumed":
                self.state = "committed"


@pytest.mark.parametrize("length", range(1, 6))
def test_every_short_history_of_a_tree_ends_where_the_model_says(length: int) -> None:
    """`back` = a learner that resumed before the update, `again` = one that resumed after it (step 1)."""
    for history in itertools.product(ACTIONS, repeat=length):
        delivery, model = Delivery(small(steps=1, batch_trees=1)), Sets()
        _, slot = delivery.take_slot()
        delivery.finished(TREE, slot)
        for action in history:
            delivery.credit = delivery.sent + 1
            match action:
                case "deliver":
                    delivery.next_delivery()
                case "consume":
                    delivery.consume(TREE.id, 1)
                case "commit":
                    delivery.commit(TREE.id, 1)
                case "drop":
                    delivery.discard(TREE.id, "stale")
                case _:
                    delivery.rejoin(Version(1, 0 if action == "back" else 1))
            model.apply(action, 1)
        assert state_of(delivery) == model.state, history
        assert len(delivery.parcels) + delivery.committed + sum(delivery.dropped.values()) == 1, history
        assert delivery.room(0, 0) == (model.state == "dropped"), history


def state_of(delivery: Delivery) -> str:
    parcel = delivery.parcels.get(TREE.id)
    if parcel is None:
        return "committed" if delivery.committed else "dropped"
    assert delivery.states[parcel.state] == 1 == sum(delivery.states.values())
    return parcel.state.value


def test_a_slot_that_was_dropped_is_the_first_to_be_taken_again() -> None:
    delivery = Delivery(small(steps=2, batch_trees=2))
    assert [delivery.take_slot() for _ in range(4)] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    delivery.drop(2, "x")
    delivery.drop(0, "x")
    assert [delivery.take_slot() for _ in range(2)] == [(4, 0), (5, 2)]


@pytest.mark.parametrize("step, lag, accepted, running, room", [
    (0, 0, 0, 0, 2), (0, 0, 1, 1, 0), (1, 0, 2, 0, 2), (0, 1, 2, 1, 1), (3, 5, 8, 0, 0), (3, 0, 7, 0, 1), (2, 0, 6, 3, -3),
])  # fmt: skip
def test_the_room_ahead_is_that_of_the_formula_and_of_the_run(
    step: int, lag: int, accepted: int, running: int, room: int
) -> None:
    """(step + K + 1) · batch − (accepted + running), and never more than steps · batch in all."""
    delivery = Delivery(small(steps=4, batch_trees=2, max_policy_lag=lag))
    for _ in range(accepted + running):
        delivery.take_slot()
    delivery.committed = accepted
    assert delivery.room(step, running) == room


def test_the_first_prompt_of_a_pool_takes_the_slots_of_its_wave_and_the_pool_is_filled_before_all_else() -> (
    None
):
    """Waves of two out of four; a slot of an older wave that is free meanwhile waits."""
    delivery = Delivery(small(steps=3, batch_trees=2, max_policy_lag=0), pool=4)
    assert delivery.room(0, 0) == 2
    assert [delivery.take_slot() for _ in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert delivery.pools == {0: 0} and delivery.taken == 2 and delivery.room(0, 0) == 0
    delivery.chosen(0)
    delivery.drop(0, "not_selected", candidate=True)
    delivery.drop(0, "not_selected", candidate=True)
    assert delivery.room(1, 2) == 2
    assert delivery.take_slot() == (4, 2)
    delivery.drop(1, "no_outcome")
    assert delivery.room(0, 1) == 3 == delivery.room(1, 1), "whatever the learner's step"
    assert [delivery.take_slot() for _ in range(3)] == [(5, 2), (6, 2), (7, 2)]
    assert delivery.room(0, 1) == -1 and delivery.room(1, 1) == 1
    assert delivery.take_slot() == (8, 1)


def test_a_candidate_that_is_dropped_leaves_a_gap_in_its_pool_and_no_free_slot() -> None:
    delivery = Delivery(small(steps=2, batch_trees=2), pool=4)
    for _ in range(4):
        delivery.take_slot()
    delivery.drop(0, "inspect_failed", candidate=True)
    assert delivery.pools == {0: 1} and delivery.taken == 2
    assert delivery.take_slot() == (4, 0) and delivery.pools == {0: 0}
    delivery.chosen(0)
    delivery.drop(1, "stale")
    assert delivery.taken == 1 and delivery.take_slot() == (5, 1)


def test_a_pool_counts_as_a_whole_wave_of_work_ahead_from_its_first_prompt_on() -> None:
    delivery = Delivery(small(steps=9, batch_trees=2, max_policy_lag=1), pool=6)
    delivery.take_slot()
    assert delivery.room(0, 0) == 5
    for _ in range(5):
        delivery.take_slot()
    assert delivery.room(0, 0) == 2, "one wave more"
    delivery.chosen(0)
    assert delivery.room(0, 2) == 2, "two of it grow now"


def test_every_interleaving_of_two_continuations_gives_the_same_tree() -> None:
    """Two actors, three messages each, all twenty orders."""
    trees = []
    for positions in itertools.combinations(range(6), 3):
        rig = Rig(small(batch_trees=1, steps=1))
        rig.learner()
        actors = [rig.actor("a/1", slots=1), rig.actor("b/1", slots=1)]
        rig.inspect("a/1")
        leases = {actor: rig.leases(actor)[0] for actor in actors}
        scripts = {actor: iter(script(leases[actor], number == 0)) for number, actor in enumerate(actors)}
        for position in range(6):
            actor = actors[position in positions]
            assert rig.say(actor, next(scripts[actor])).ack
        trees += [m.tree for m in rig.take(LEARNER, TreeReady)]
    assert len(trees) == 20 and all(tree == trees[0] for tree in trees)


def script(lease: Lease, won: bool) -> list[Message]:
    return [
        Starting(lease.id, Version(0, 0)),
        Expanded(lease.id, 0, turn(lease, 0, last=True, reward=float(won))),
        Finished(lease.id, 1, win(float(won))),
    ]
