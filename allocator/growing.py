"""What actors say about the work they hold. Every handler is idempotent by lease epoch and turn offset.

Returns True to acknowledge. False = something before this is missing: the sender sends again, in order.

    Inspected    the root is known: the budget may name an allowance
    Starting     the one place where a lease may turn out too old: then it is revoked, whatever comes of it
    Expanded     a node; progress
    Finished, HorizonReached, Failed, Declined    the attempt ended

Whatever concerns an attempt that is not the newest, or not held by the sender, is counted and has no effect.
What it cost is counted too, once: each token an actor reports is in `turn_accepted`, `events/crossed_tokens`
or `events/discarded_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from allocator.door import CONFIG_ERROR, end_run
from allocator.endings import (
    confirm_stop,
    drop_branch,
    drop_open_tree,
    end_attempt,
    end_branch,
    end_with_run,
    give_back,
    retry,
)
from allocator.granting import end_inspection
from allocator.peers import Peer
from allocator.rules.base import OPEN
from allocator.state import CoreState
from allocator.tree import ENDED, QUEUED, RUNNING, Branch
from common.messages import (
    Declined,
    Expanded,
    Failed,
    Finished,
    Heartbeat,
    HorizonReached,
    Inspected,
    InspectFailed,
    Message,
    Revoke,
    Starting,
)
from common.nouns import LeaseId, Turn


def find(s: CoreState, peer: Peer, lease: LeaseId, message: Message) -> Branch | None:
    """The branch whose live attempt this is, held by this peer; else None, counted by what it is instead.
    Only a live attempt has a holder."""
    tree = s.forest.trees.get(lease.tree)
    branch = tree.branches.get(lease.number) if tree is not None else None
    if branch is not None and branch.epoch == lease.epoch and branch.holder == peer.key:
        return branch
    kind = late_kind(s, peer, lease, branch)
    s.counts[kind] += 1
    if isinstance(message, Starting | Expanded):
        if kind in ("fenced", "invalid") and lease not in peer.stopping and s.ending is None:
            s.send(peer.key, Revoke(lease, "fenced"))
    else:
        confirm_stop(s, peer, lease)
        peer.taken.pop(lease, None)
    return None


def late_kind(s: CoreState, peer: Peer, lease: LeaseId, branch: Branch | None) -> str:
    """What a message about an attempt that is not live is: `crossed` a revoke, `fenced`, `duplicates`, …"""
    if lease in peer.stopping:
        return "crossed"
    if lease.tree >= s.delivery.opened:
        return "invalid"
    if branch is None:
        return "late"
    if lease.epoch > branch.epoch:
        return "invalid"
    return "fenced" if lease.epoch < branch.epoch or branch.state is not ENDED else "duplicates"


def starting(s: CoreState, peer: Peer, message: Starting) -> bool:
    branch = find(s, peer, message.lease, message)
    if branch is None or s.ending is not None:
        return True
    if branch.state is RUNNING:
        s.counts["duplicates"] += 1
        return True
    if s.forest.too_old(branch):
        s.counts["too_old"] += 1
        end_attempt(s, branch, peer, "revoked", "scores too old", confirmed=False)
        give_back(s, branch)
        return True
    s.forest.oldest_score = max(s.forest.oldest_score, 0 if branch.checked else s.forest.age(branch))
    s.leases.start(branch, peer, s.now)
    return True


def expanded(s: CoreState, peer: Peer, message: Expanded) -> bool:
    branch = find(s, peer, message.lease, message)
    if branch is None or s.ending is not None:
        _count_crossed(s, peer, message)
        return True
    have = len(branch.nodes)
    if branch.state is QUEUED or message.offset > have:
        s.counts["gaps"] += 1
        return False
    if message.offset < have:
        s.counts["duplicates"] += 1
        return True
    if branch.tree.tip(branch).turn.status is not OPEN:
        s.counts["invalid"] += 1
        return True
    if s.rule.turns_need and _ends_for_want(s, peer, message.turn):
        return True
    s.forest.expand(branch, message.turn, message.scores)
    s.leases.renew(branch, peer, s.now)
    s.record(
        "turn_accepted",
        tree=message.lease.tree, number=message.lease.number, epoch=message.lease.epoch,
        offset=have, tokens=message.turn.num_action_tokens,
    )  # fmt: skip
    return True


def _ends_for_want(s: CoreState, peer: Peer, turn: Turn) -> bool:
    """Whether the turn lacks what the rule reads: that ends the run."""
    lacking = next((name for name in sorted(s.rule.turns_need) if not getattr(turn, name)), "")
    if not lacking:
        return False
    what = f"allocator.rule={s.rule.name} needs the {lacking} of every turn, and actor {peer.key} sent none"
    end_run(s, CONFIG_ERROR, f"{what}: choose another rule, or an engine that reports them")
    return True


def _count_crossed(s: CoreState, peer: Peer, message: Expanded) -> None:
    """A turn that was sampled though its lease had been taken away, each counted once."""
    accounted = peer.taken.get(message.lease)
    if accounted is not None and message.offset not in accounted:
        accounted.add(message.offset)
        s.counts["crossed_tokens"] += message.turn.num_action_tokens


def finished(s: CoreState, peer: Peer, message: Finished) -> bool:
    return _ended(s, peer, message, "finished")


def horizon(s: CoreState, peer: Peer, message: HorizonReached) -> bool:
    return _ended(s, peer, message, "horizon")


def _ended(s: CoreState, peer: Peer, message: Finished | HorizonReached, kind: str) -> bool:
    """The continuation is over, if all its turns are here.

    A retry may end without starting: an earlier attempt had delivered the last turn, but not the end. What
    the environment paid is the sum over all turns, those of earlier attempts included; the sender knows its
    own only.
    """
    branch = find(s, peer, message.lease, message)
    if branch is None:
        return True
    if s.ending is not None:
        end_with_run(s, branch, peer, "", confirmed=True)
        return True
    have = len(branch.nodes)
    if message.turns > have or (branch.state is QUEUED and not branch.checked):
        s.counts["gaps"] += 1
        return False
    at_horizon = kind == "horizon"
    open_tip = have > 0 and branch.tree.tip(branch).turn.status is OPEN
    if message.turns != have or have == 0 or (at_horizon and not (open_tip and branch.horizon)):
        s.counts["invalid"] += 1
        return True
    peer.progress_at = s.now
    outcome = branch.tree.earned(branch, message.outcome) if isinstance(message, Finished) else None
    end_branch(s, branch, peer, kind, outcome)
    return True


def failed(s: CoreState, peer: Peer, message: Failed) -> bool:
    # Before the lease is looked up: what crossed a revoke was sampled all the same.
    crossing = message.lease in peer.taken
    branch = find(s, peer, message.lease, message)
    if branch is not None or crossing:
        s.counts["discarded_tokens"] += message.discarded_tokens
    if branch is None:
        return True
    if s.ending is not None:
        end_with_run(s, branch, peer, message.reason, confirmed=True)
        return True
    s.counts["failures"] += 1
    peer.progress_at = s.now
    if message.retry:
        retry(s, branch, peer, "failed", message.reason, confirmed=True)
    else:
        drop_branch(s, branch, peer, message.reason, confirmed=True)
    return True


def declined(s: CoreState, peer: Peer, message: Declined) -> bool:
    """Given back unstarted: elsewhere, and nothing more for this actor until it has rested a heartbeat."""
    branch = find(s, peer, message.lease, message)
    if branch is None:
        return True
    if s.ending is not None:
        end_with_run(s, branch, peer, message.reason, confirmed=True)
        return True
    end_attempt(s, branch, peer, "declined", message.reason, confirmed=True)
    s.leases.want(branch)
    if not peer.resting:
        peer.resting = True
        s.peers.changed(peer)
        s.remind(s.now + s.settings.heartbeat_s, "rest", peer)
    return True


def inspected(s: CoreState, peer: Peer, message: Inspected) -> bool:
    tree = s.forest.trees.get(message.tree)
    if tree is None or tree.nodes or tree.inspector != peer.key:
        s.counts["duplicates" if message.tree < s.delivery.opened else "invalid"] += 1
        return True
    if message.task != tree.task or message.root.action or message.root.status is not OPEN:
        return inspect_failed(s, peer, InspectFailed(message.tree, "answered for another task"))
    end_inspection(s, tree)
    if s.ending is None:
        s.forest.root(tree, message.root, message.gold_answer)
    return True


def inspect_failed(s: CoreState, peer: Peer, message: InspectFailed) -> bool:
    tree = s.forest.trees.get(message.tree)
    if tree is None or tree.nodes or tree.inspector != peer.key:
        s.counts["duplicates" if message.tree < s.delivery.opened else "invalid"] += 1
        return True
    s.counts["inspections_failed"] += 1
    end_inspection(s, tree)
    if tree.inspections >= s.settings.max_attempts and s.ending is None:
        drop_open_tree(s, tree, "inspect_failed")
    else:
        s.uninspected.append(tree)
    return True


def heartbeat(s: CoreState, peer: Peer, message: Heartbeat) -> bool:
    """It lives. That renews no lease."""
    return True


Handler = Callable[[CoreState, Peer, Any], bool]

HANDLERS: dict[type[Message], Handler] = {
    Heartbeat: heartbeat,
    Starting: starting,
    Expanded: expanded,
    Finished: finished,
    HorizonReached: horizon,
    Failed: failed,
    Declined: declined,
    Inspected: inspected,
    InspectFailed: inspect_failed,
}
"""What an actor may say, `Hello` and `Bye` aside."""
