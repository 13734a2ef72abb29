"""The checks bite: each bug below, planted into the core, is caught by at least one of them.

Checks: the audit after every event of a simulated faulty fleet, the dict model of `test_machine` fed with its
records, and the comparison with the plain sequential search. Without a planted bug all of them pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import allocator.granting
import allocator.growing
import allocator.waves
from allocator.delivery import Delivery
from allocator.forest import Forest
from allocator.leases import LeaseBook
from allocator.peers import Peer
from allocator.state import CoreState
from allocator.tree import Branch, BranchState, GrowingTree
from common.messages import Expanded
from common.predictor import HistoryPredictor, Target
from tests.allocator.checks import CHECKS

# ---------------------------------------------------------------------------------------------- the bugs


def in_flight_not_counted(patch: pytest.MonkeyPatch) -> None:
    grow = Forest._grow

    def planted(self: Forest, tree: GrowingTree, picks: Any) -> list[Branch]:
        before = dict(tree.flying)
        branches = grow(self, tree, picks)
        tree.flying = {**dict.fromkeys(tree.flying, 0), **before}
        return branches

    patch.setattr(Forest, "_grow", planted)


def duplicate_turn_accepted(patch: pytest.MonkeyPatch) -> None:
    handle = allocator.growing.HANDLERS[Expanded]

    def planted(s: CoreState, peer: Peer, message: Expanded) -> bool:
        branch = allocator.growing.find(s, peer, message.lease, message)
        if branch is not None and branch.state is BranchState.RUNNING and message.offset < len(branch.nodes):
            s.forest.expand(branch, message.turn, message.scores)
            return True
        return handle(s, peer, message)

    patch.setitem(allocator.growing.HANDLERS, Expanded, planted)


def late_result_counted_twice(patch: pytest.MonkeyPatch) -> None:
    find = allocator.growing.find

    def planted(s: CoreState, peer: Peer, lease: Any, message: Any) -> Branch | None:
        tree = s.forest.trees.get(lease.tree)
        branch = tree.branches.get(lease.number) if tree is not None else None
        if branch is not None and branch.epoch == lease.epoch and branch.endings:
            return branch
        return find(s, peer, lease, message)

    patch.setattr(allocator.growing, "find", planted)


def result_of_an_older_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    find = allocator.growing.find

    def planted(s: CoreState, peer: Peer, lease: Any, message: Any) -> Branch | None:
        tree = s.forest.trees.get(lease.tree)
        branch = tree.branches.get(lease.number) if tree is not None else None
        if branch is not None and branch.live:
            return branch
        return find(s, peer, lease, message)

    patch.setattr(allocator.growing, "find", planted)


def two_attempts_share_an_epoch(patch: pytest.MonkeyPatch) -> None:
    issue = LeaseBook.issue

    def planted(self: LeaseBook, branch: Branch, peer: Peer, now: float) -> None:
        branch.epoch = min(branch.epoch, 0) if branch.epoch < 0 else branch.epoch - 1
        issue(self, branch, peer, now)

    patch.setattr(LeaseBook, "issue", planted)


def budget_leaked_when_given_back(patch: pytest.MonkeyPatch) -> None:
    give_back = Forest.give_back

    def planted(self: Forest, branch: Branch) -> None:
        branch.tree.spent += 1
        give_back(self, branch)

    patch.setattr(Forest, "give_back", planted)


def budget_leaked_on_failure(patch: pytest.MonkeyPatch) -> None:
    want = LeaseBook.want

    def planted(self: LeaseBook, branch: Branch) -> None:
        branch.tree.spent += branch.failures > 0
        want(self, branch)

    patch.setattr(LeaseBook, "want", planted)


def tree_closed_with_a_live_lease(patch: pytest.MonkeyPatch) -> None:
    touch = Forest.touch

    def planted(self: Forest, tree: GrowingTree) -> None:
        if tree.outstanding == 1 and tree.branches:
            tree.outstanding = 0
        touch(self, tree)

    patch.setattr(Forest, "touch", planted)


def outcome_of_a_dropped_attempt_forgotten(patch: pytest.MonkeyPatch) -> None:
    """An attempt that ends is not taken off its holder's books."""
    end = LeaseBook.end

    def planted(self: LeaseBook, branch: Branch, peer: Peer, kind: str, *, confirmed: bool) -> None:
        end(self, branch, peer, kind, confirmed=confirmed)
        if kind == "failed":
            peer.running[branch] = None

    patch.setattr(LeaseBook, "end", planted)


def credit_ignored(patch: pytest.MonkeyPatch) -> None:
    deliver = Delivery.next_delivery

    def planted(self: Delivery) -> Any:
        credit, self.credit = self.credit, self.credit + 3
        try:
            return deliver(self)
        finally:
            self.credit = credit

    patch.setattr(Delivery, "next_delivery", planted)


def consumed_trees_not_delivered_again(patch: pytest.MonkeyPatch) -> None:
    """After a learner restart everything it ever consumed is taken for safe."""
    rejoin = Delivery.rejoin

    def planted(self: Delivery, version: Any) -> Any:
        for parcel in self.parcels.values():
            parcel.step = min(parcel.step, version.step)
        return rejoin(self, version)

    patch.setattr(Delivery, "rejoin", planted)


def dropped_trees_keep_their_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Delivery, "drop", lambda self, slot, reason: self.dropped.update([reason]))


def predictor_learns_on_arrival(patch: pytest.MonkeyPatch) -> None:
    def planted(self: allocator.waves.Waves, tree: GrowingTree) -> None:
        self.predictor.update(tree.targets()[0])

    patch.setattr(allocator.waves.Waves, "complete", planted)


def baseline_from_the_newest_predictor(patch: pytest.MonkeyPatch) -> None:
    """Not from the pinned one: shows as a version that is pinned and not used."""
    patch.setattr(HistoryPredictor, "unpin", lambda self, version: None)


def retry_draws_anew(patch: pytest.MonkeyPatch) -> None:
    write = allocator.granting.write_lease

    def planted(branch: Branch, *rest: Any) -> Any:
        branch.seed += branch.epoch
        return write(branch, *rest)

    patch.setattr(allocator.granting, "write_lease", planted)


def retry_forgets_accepted_turns(patch: pytest.MonkeyPatch) -> None:
    want = LeaseBook.want

    def planted(self: LeaseBook, branch: Branch) -> None:
        branch.nodes.clear()
        want(self, branch)

    patch.setattr(LeaseBook, "want", planted)


def candidates_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    import allocator.rules.random as rule

    def planted(view: Any, branches: Any) -> list[int]:
        nodes = sorted(index for branch in branches for index in branch.nodes)
        return [0, *(i for i in nodes if view.node(i).turn.status.value == "open")]

    patch.setattr(rule, "expansion_nodes", planted)


def staleness_not_looked_at_when_deciding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forest, "throttled", lambda self, tree: False)
    patch.setattr(Forest, "too_old", lambda self, branch: False)


def scores_never_age(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forest, "_event", lambda self, branch, kind: None)


def predictor_averages_realised_children(patch: pytest.MonkeyPatch) -> None:
    targets = GrowingTree.targets

    def planted(self: GrowingTree) -> tuple[list[Target], int]:
        found, censored = targets(self)
        mean = sum(target.outcome for target in found) / len(found)
        return [Target(found[0].prefix, found[0].predicted, mean)], censored

    patch.setattr(GrowingTree, "targets", planted)


BUGS = [
    (in_flight_not_counted, "fleet"),
    (duplicate_turn_accepted, "fleet"),
    (late_result_counted_twice, "fleet"),
    (result_of_an_older_epoch_accepted, "fleet"),
    (two_attempts_share_an_epoch, "fleet"),
    (budget_leaked_when_given_back, "fleet"),
    (budget_leaked_on_failure, "fleet"),
    (tree_closed_with_a_live_lease, "fleet"),
    (outcome_of_a_dropped_attempt_forgotten, "fleet"),
    (credit_ignored, "fleet"),
    (consumed_trees_not_delivered_again, "fleet"),
    (dropped_trees_keep_their_place, "fleet"),
    (predictor_learns_on_arrival, "search"),
    (baseline_from_the_newest_predictor, "fleet"),
    (retry_draws_anew, "search"),
    (retry_forgets_accepted_turns, "fleet"),
    (candidates_in_order_of_arrival, "search"),
    (staleness_not_looked_at_when_deciding, "search"),
    (staleness_not_looked_at_when_deciding, "aging"),
    (scores_never_age, "aging"),
    (predictor_averages_realised_children, "teaching"),
]


@pytest.mark.parametrize("plant, check", BUGS, ids=[f"{plant.__name__}-{check}" for plant, check in BUGS])
def test_a_planted_bug_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        CHECKS[check]()


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_without_a_bug_nothing_is_caught(check: Callable[[], None]) -> None:
    check()
