"""The pump: from room at the actors to decisions, leases and new trees, and from credit to deliveries.

    consumes      room at actors, waiting continuations, trees to decide about, the work-ahead bound, credit
    produces      Grant, Inspect, TreeReady
    waits for     a learner's hello (there are no weights before), room, news from the trees, credit
    unblocked by  every message and tick: it runs after each, and costs nothing when there is nothing to do

Order: continuations that already wait, lowest tree first; then new trees; then, in trees where something is
still outstanding, decisions that do not know of it, fewest outstanding first. So a rule speculates only where
the bound on work ahead leaves nothing else to do, and no further than it must. For a rule that reads nothing
no decision is speculative: there old trees finish before new ones start. Nothing is decided speculatively for
an actor to hold beyond its slots: by the time a slot is free such a lease is too old, and starting it to find
that out costs a turn.
"""

from __future__ import annotations

from functools import lru_cache

from allocator.endings import NOT_SELECTED, close_tree, drop_open_tree, end_attempt, give_back
from allocator.leases import write_lease
from allocator.peers import Peer
from allocator.rules.base import Decision
from allocator.state import CoreState
from allocator.tree import Branch, GrowingTree
from common.messages import Grant, Inspect, TreeReady
from common.nouns import Lease, Version
from common.staleness import oldest_allowed

GRANT_LEASES = 64
"""Most leases in one message: with usual prefixes a few hundred KiB."""
GRANT_BYTES = 4 << 20
"""A message of leases is cut where their prefixes and snapshots pass this, far below a frame's limit."""


def pump(s: CoreState) -> None:
    """Do all that can be done now."""
    if s.ending is None and s.version is not None:
        granted: dict[Peer, list[Lease]] = {}
        while _settle(s) or _use_room(s, s.version, granted):
            pass
        for peer, leases in granted.items():
            _send_grants(s, peer, leases, s.version)
    _deliver(s)


def _settle(s: CoreState) -> bool:
    """Trees where nothing is outstanding decide or close at once. True when there was one."""
    forest = s.forest
    while forest.chosen:
        s.delivery.chosen(forest.chosen.popleft())
    while forest.rejected:
        drop_open_tree(s, forest.trees[forest.rejected.popleft()], NOT_SELECTED)
    if not forest.settled:
        return False
    tree = forest.trees.get(forest.settled.popleft())
    if tree is not None:
        tree.settled = False
        if tree.outstanding == 0:
            _ask(s, tree)
    return True


def _ask(s: CoreState, tree: GrowingTree) -> None:
    number = tree.decisions
    decision, branches = s.forest.decide(tree)
    if decision.picks or decision.stops:
        _record_decision(s, tree, number, decision, branches)
    for branch in branches:
        s.leases.want(branch)
    if branches:
        s.forest.touch(tree)
    elif tree.outstanding == 0 and not tree.parked:
        if not decision.complete and not decision.stops:
            raise RuntimeError(f"rule {s.rule.name!r} waits in tree {tree.id} though nothing is outstanding")
        close_tree(s, tree) if decision.complete else s.forest.touch(tree)


def _record_decision(
    s: CoreState, tree: GrowingTree, number: int, decision: Decision, branches: list[Branch]
) -> None:
    """What was fixed by it, so that a replay that decides otherwise is noticed where it does."""
    s.record(
        "decided",
        tree=tree.id, number=number,
        leases=[b.number for b in branches], anchors=[b.anchor for b in branches],
        weights=[b.weight for b in branches], baselines=[b.baseline for b in branches],
        stops=[stop.number for stop in decision.stops], rewards=[stop.reward for stop in decision.stops],
    )  # fmt: skip


def _use_room(s: CoreState, version: Version, granted: dict[Peer, list[Lease]]) -> bool:
    """Give the least loaded actor one more thing to do. False when there is no room or nothing to do."""
    peer = s.peers.best()
    if peer is None:
        return False
    if s.uninspected:
        inspect(s, s.uninspected.popleft(), peer)
        return True
    branch = s.leases.next_pending()
    if branch is not None:
        if s.forest.too_old(branch):
            give_back(s, branch)
        else:
            granted.setdefault(peer, []).append(_issue(s, branch, peer, version))
        return True
    if s.forest.speculates:
        if _open(s, peer, version):
            return True
        if peer.load >= peer.capabilities.slots:
            return False
    tree = s.forest.next_wanting()
    if tree is not None:
        if tree.outstanding > 0 and not s.forest.throttled(tree):
            _ask(s, tree)
        return True
    return not s.forest.speculates and _open(s, peer, version)


def _issue(s: CoreState, branch: Branch, peer: Peer, version: Version) -> Lease:
    s.leases.issue(branch, peer, s.now)
    deadline = s.settings.lease_deadline_s
    s.remind(s.now + deadline, "lease", branch, branch.epoch)
    s.record("lease_issued", tree=branch.tree.id, number=branch.number, epoch=branch.epoch, peer=peer.key)
    return write_lease(branch, oldest_start(version, branch.tree.wave, s.settings.max_policy_lag), deadline)


@lru_cache(maxsize=1024)
def oldest_start(version: Version, wave: int, max_lag: int) -> Version:
    """Oldest weights that a continuation of a tree of `wave` may start with while `version` is the newest.

    What counts is not the learner's step now but at the update that trains the tree: update `wave`, or the
    next one if that has been made. Work-ahead opens a tree up to K updates before that one, so a lease that
    began with weights already K versions old would be stale by schedule. Never newer than `version`: after a
    learner fell back, open trees may be of waves further ahead than K.
    """
    trained_at = Version(version.lineage, max(version.step, wave))
    return Version(version.lineage, min(version.step, oldest_allowed(trained_at, max_lag)))


def _send_grants(s: CoreState, peer: Peer, leases: list[Lease], version: Version) -> None:
    batch: list[Lease] = []
    size = 0
    for lease in leases:
        bytes_of = len(lease.prefix) + len(lease.snapshot or b"") + sum(len(h.action) for h in lease.history)
        if batch and (len(batch) == GRANT_LEASES or size + bytes_of > GRANT_BYTES):
            s.send(peer.key, Grant(batch, version, s.weights_endpoint))
            batch, size = [], 0
        batch.append(lease)
        size += bytes_of
    s.send(peer.key, Grant(batch, version, s.weights_endpoint))


def _open(s: CoreState, peer: Peer, version: Version) -> bool:
    """Open a tree when those being set up will not fill the room there is. A pool fills none before it is
    whole."""
    forest, delivery = s.forest, s.delivery
    if forest.inspecting * s.budget.typical >= s.peers.free and not any(delivery.pools.values()):
        return False
    if delivery.room(version.step, len(forest.trees) - forest.candidates) <= 0:
        return False
    number, slot = delivery.take_slot()
    wave, candidate = slot // s.settings.batch_trees, delivery.in_pool(slot)
    tree = forest.open(number, slot, wave, version, candidate=candidate)
    s.record("tree_opened", tree=number, task=str(tree.task), wave=tree.wave)
    inspect(s, tree, peer)
    return True


def inspect(s: CoreState, tree: GrowingTree, peer: Peer) -> None:
    """Have an actor set the task up and describe its root."""
    tree.inspector = peer.key
    tree.inspections += 1
    s.forest.inspecting += 1
    peer.inspecting[tree.id] = None
    s.peers.changed(peer)
    s.remind(s.now + s.settings.lease_deadline_s, "inspect", tree, tree.inspections)
    s.send(peer.key, Inspect(tree.id, tree.task, s.version, s.weights_endpoint))


def end_inspection(s: CoreState, tree: GrowingTree) -> None:
    """Nobody sets it up any more."""
    peer = s.peers.members.get(tree.inspector)
    if peer is not None and tree.id in peer.inspecting:
        del peer.inspecting[tree.id]
        s.peers.changed(peer)
    if tree.inspector:
        s.forest.inspecting -= 1
    tree.inspector = ""


def _deliver(s: CoreState) -> None:
    """Finished trees to the learner, lowest first, within its credit."""
    learner = s.peers.learner
    if learner is None or not learner.alive or s.ending is not None:
        return
    while (parcel := s.delivery.next_delivery()) is not None:
        s.record("tree_delivered", tree=parcel.tree.id)
        s.send(learner.key, TreeReady(parcel.tree))


def rebalance(s: CoreState) -> None:
    """Actors that hold nothing get what others hold beyond what they can run.

    Prefetched leases would otherwise stay with the actors that came first. They keep number, seed and
    weight, and were not started, so that taking them back chooses nothing by its outcome.
    """
    while s.peers.idle and s.peers.hoarding and not s.leases.pending and not s.forest.wanting:
        donor = next(iter(s.peers.hoarding))
        idle = next(iter(s.peers.idle))
        for branch in list(donor.queued)[-min(donor.surplus, idle.capabilities.slots) :]:
            end_attempt(s, branch, donor, "revoked", "given to an idle actor", confirmed=False)
            s.leases.want(branch)
        s.counts["rebalanced"] += 1
        before = s.leases.pending
        pump(s)
        if s.leases.pending >= before:
            return
