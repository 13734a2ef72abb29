"""How attempts, continuations and trees end: each exactly once, each with a record."""

from __future__ import annotations

from allocator.peers import Peer
from allocator.state import CoreState
from allocator.tree import Branch, GrowingTree
from common.messages import Revoke
from common.nouns import LeaseId, Outcome

NOT_SELECTED = "not_selected"
"""Why a candidate prompt is dropped whose place in the batch another one took."""


def end_attempt(s: CoreState, branch: Branch, peer: Peer, kind: str, reason: str, confirmed: bool) -> None:
    """The live attempt of a branch ends; where its holder does not know yet, it is told to stop."""
    lease = branch.id
    s.leases.end(branch, peer, kind, confirmed=confirmed)
    s.record(
        "lease_ended",
        tree=lease.tree, number=lease.number, epoch=lease.epoch,
        kind=kind, turns=len(branch.nodes), reason=reason,
    )  # fmt: skip
    if not confirmed:
        s.remind(s.now + s.settings.lease_deadline_s, "stopping", (peer.key, lease))
        if peer.alive:
            s.send(peer.key, Revoke(lease, reason))


def end_branch(s: CoreState, branch: Branch, peer: Peer, kind: str, outcome: Outcome | None) -> None:
    """The continuation reached its leaf or its horizon."""
    end_attempt(s, branch, peer, kind, "", confirmed=True)
    s.forest.end(branch, kind, outcome)


def retry(s: CoreState, branch: Branch, peer: Peer, kind: str, reason: str, *, confirmed: bool) -> None:
    """An attempt failed. Again elsewhere under the next epoch, unless too many have: then it is dropped."""
    started = branch in peer.running
    branch.failures += started or kind == "failed"
    if branch.failures >= s.settings.max_attempts:
        drop_branch(s, branch, peer, reason, confirmed=confirmed)
        return
    end_attempt(s, branch, peer, kind, reason, confirmed)
    s.leases.want(branch)


def drop_branch(s: CoreState, branch: Branch, peer: Peer, reason: str, *, confirmed: bool) -> None:
    """Given up: it stays in the tree without an outcome, and in every denominator."""
    end_attempt(s, branch, peer, "dropped", reason, confirmed)
    s.forest.end(branch, f"dropped: {reason}"[:64], None)


def give_back(s: CoreState, branch: Branch) -> None:
    """Its scores are too old to start: the rule decides anew."""
    s.counts["given_back"] += 1
    s.forest.give_back(branch)


def end_with_run(s: CoreState, branch: Branch, peer: Peer, reason: str, *, confirmed: bool) -> None:
    """The run is over: whatever the attempt brings now is not looked at. One that was stopped may be taken up
    again, and the continuation waits for that."""
    end_attempt(s, branch, peer, "run_ended", reason, confirmed)
    if s.ending is not None and s.ending.code:
        s.leases.want(branch)
    else:
        s.forest.end(branch, "run_ended", None)


def close_tree(s: CoreState, tree: GrowingTree) -> None:
    """Complete: to the learner, or dropped where no continuation has an outcome."""
    done = s.forest.close(tree)
    if done is None:
        s.waves.give_up(tree)
        s.record("tree_dropped", tree=tree.id, reason="no_outcome", tokens=tree.tokens())
        s.delivery.drop(tree.slot, "no_outcome")
        return
    s.waves.complete(tree)
    parcel = s.delivery.finished(done, tree.slot)
    s.record("tree_ready", tree=tree.id, tokens=parcel.tokens)


def drop_open_tree(s: CoreState, tree: GrowingTree, reason: str) -> None:
    """A tree without branches (its task could not be set up, or it was not selected) is given up."""
    s.forest.remove(tree)
    s.record("tree_dropped", tree=tree.id, reason=reason, tokens=tree.tokens())
    s.delivery.drop(tree.slot, reason, candidate=tree.candidate)


def confirm_stop(s: CoreState, peer: Peer, lease: LeaseId) -> bool:
    """The holder of a lease that was taken from it says that it stopped: its slot is free."""
    if lease not in peer.stopping:
        return False
    del peer.stopping[lease]
    s.peers.changed(peer)
    return True
