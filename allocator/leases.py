"""Attempts at continuations: issued with an epoch, renewed by progress, ended exactly once.

    PENDING ──issue (epoch + 1)──▶ QUEUED ──Starting──▶ RUNNING ──▶ ended{finished, horizon, failed, …}
       ▲                              │                    │
       └────────── again: same number, seed, weight; resumes behind the turns that were accepted

Only the newest epoch may report; its holder is the only one who may. An attempt ends with one of `KINDS`.
Each process of the allocator counts epochs from a number of its own: what one that died had granted, and
perhaps not got to disk, never has the epoch of anything granted after it.
"""

from __future__ import annotations

import heapq
from collections import Counter

from allocator.peers import Peer, PeerTable
from allocator.tree import ENDED, PENDING, QUEUED, RUNNING, Branch
from common.nouns import Lease, Version

KINDS = (
    "finished", "horizon", "failed", "expired", "declined", "revoked", "fenced", "dropped", "run_ended",
)  # fmt: skip
"""`fenced` = taken from a replaced incarnation, or granted by an allocator that died; `expired` = no progress
in time, or its holder is gone; `dropped` = the last attempt of a continuation that was given up."""
EPOCHS_A_BOOT = 1_000_000
"""More attempts than one continuation ever has under one process."""


class LeaseBook:
    """Pending continuations, and the counts of all attempts."""

    def __init__(self, peers: PeerTable) -> None:
        self.peers = peers
        self.issued = 0
        self.live = 0
        self.ended: Counter[str] = Counter()
        self.pending = 0
        self.first_epoch = 0
        """Epoch of the first attempts that this process of the allocator issues."""
        self._heap: list[tuple[int, int, Branch]] = []

    def want(self, branch: Branch) -> None:
        """A continuation waits for an actor: lower trees and numbers first, so that old trees finish."""
        branch.state = PENDING
        self.pending += 1
        heapq.heappush(self._heap, (branch.tree.id, branch.number, branch))

    def next_pending(self) -> Branch | None:
        """Take the next continuation that waits."""
        if not self._heap:
            return None
        self.pending -= 1
        return heapq.heappop(self._heap)[2]

    def issue(self, branch: Branch, peer: Peer, now: float) -> None:
        """Give it to an actor under a new epoch, which fences all earlier attempts."""
        branch.epoch = max(branch.epoch + 1, self.first_epoch)
        branch.attempts += 1
        branch.state = QUEUED
        branch.holder = peer.key
        branch.progress_at = now
        peer.queued[branch] = None
        self.issued += 1
        self.live += 1
        self.peers.changed(peer)

    def start(self, branch: Branch, peer: Peer, now: float) -> None:
        """Its first token is about to be sampled."""
        del peer.queued[branch]
        peer.running[branch] = None
        branch.state = RUNNING
        branch.checked = True
        self.renew(branch, peer, now)
        self.peers.queue_changed(peer)

    def renew(self, branch: Branch, peer: Peer, now: float) -> None:
        """Progress, not heartbeats: a hung environment or engine beats on."""
        branch.progress_at = peer.progress_at = now

    def due(self, branch: Branch, peer: Peer, deadline_s: float) -> float:
        """When it expires. While queued, any progress of its holder renews it; once started, only its own."""
        queued = branch.state is QUEUED
        return (max(branch.progress_at, peer.progress_at) if queued else branch.progress_at) + deadline_s

    def end(self, branch: Branch, peer: Peer, kind: str, *, confirmed: bool) -> None:
        """The live attempt is over. Unless its holder said so, its slot counts as taken until it does."""
        peer.queued.pop(branch, None)
        peer.running.pop(branch, None)
        if not confirmed:
            peer.stopping[branch.id] = None
            peer.take(branch)
        elif peer.taken:
            peer.taken.pop(branch.id, None)
        branch.state = ENDED
        branch.holder = ""
        branch.endings.append(kind)
        self.live -= 1
        self.ended[kind] += 1
        self.peers.changed(peer)


def write_lease(branch: Branch, oldest: Version, deadline_s: float) -> Lease:
    """The lease of a branch's current attempt: it starts behind the turns that were accepted.

    Where the last of them ended the world and only the outcome is missing, the actor replays it and says how.
    `oldest` is what its tree's update will still train (`granting.oldest_start`), anew for every attempt.
    """
    tree = branch.tree
    tip = tree.tip(branch)
    path = tree.path(tip)
    return Lease(
        id=branch.id,
        task=tree.task,
        anchor=branch.anchor,
        prefix=tree.prefix(path),
        snapshot=tip.turn.snapshot,
        history=[] if tip.turn.snapshot is not None else tree.history(path),
        state_hash=tip.turn.state_hash,
        depth=tip.depth,
        offset=len(branch.nodes),
        seed=branch.seed,
        horizon=branch.horizon,
        score_stamp=branch.stamp,
        weight=branch.weight,
        baseline=branch.baseline,
        predictor_version=branch.predictor_version,
        min_version=oldest,
        deadline_s=deadline_s,
    )
