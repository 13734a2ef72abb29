"""What an actor does about the leases it is granted: pure bookkeeping, no clocks, sockets or tasks.

    grant ─▶ queued ─start─▶ running ─end─▶ forgotten (its number and epoch are remembered)
               │                │
            revoke           revoke, newer epoch ─▶ the attempt is told to stop
               ▼
             ended unstarted

A lease is known by (tree, number) and fenced by its epoch: a resend is ignored, an older epoch is ignored,
a newer one replaces the attempt that is held. Queued leases start in the order they came, except those
that need weights newer than the actor holds: they wait without holding up the others.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from common.nouns import Lease, LeaseId, Version

REMEMBERED = 1 << 16
"""Ended leases whose epoch is kept, so that a late resend starts nothing: hours of work on one actor."""

Key = tuple[int, int]
"""(tree, number): one continuation, whichever attempt."""


@dataclass(slots=True)
class Attempt:
    """One lease held here, and what it has been told to do."""

    lease: Lease
    granted_at: float
    """Monotonic seconds, by the caller's clock."""
    started: bool = False
    stop_reason: str = ""
    """Why it must stop before its next turn; empty = go on."""
    stop_retry: bool = False
    """Whether another attempt should take over."""
    revoked: bool = False
    """Whether the allocator has given up on it already: its result will be discarded."""
    turns: int = 0
    """Turns of the continuation that were reported, those of earlier attempts included."""

    def __post_init__(self) -> None:
        self.turns = self.lease.offset

    def stop(self, reason: str, *, retry: bool = False, revoked: bool = False) -> None:
        """Tell it to stop; the first reason stays."""
        if not self.stop_reason:
            self.stop_reason, self.stop_retry, self.revoked = reason, retry, revoked


class Granted(enum.Enum):
    """What became of a grant."""

    QUEUED = "queued"
    KNOWN = "known"
    """This attempt is held or has ended: a resend."""
    OUTDATED = "outdated"
    """A newer attempt at the same continuation is known."""
    NO_ROOM = "no room"
    """Running and queued leases fill slots and prefetch: the caller declines it."""


@dataclass(slots=True)
class LeaseTable:
    """See the module docstring. Example: `LeaseTable(slots=64, prefetch=16)`."""

    slots: int
    """Leases run at once."""
    prefetch: int
    """Leases held beyond those."""
    _queued: OrderedDict[Key, Attempt] = field(default_factory=OrderedDict)
    _running: dict[Key, Attempt] = field(default_factory=dict)
    _stopping: dict[LeaseId, Attempt] = field(default_factory=dict)
    """Replaced attempts that have not ended yet; they still hold their slot."""
    _epochs: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    """Newest epoch known, oldest entry first."""
    _fenced: list[Attempt] = field(default_factory=list)

    def grant(self, lease: Lease, now: float) -> Granted:
        """Queue `lease` unless it is a resend, outdated, or one too many."""
        key = _key(lease.id)
        known = self._epochs.get(key, -1)
        if lease.id.epoch <= known:
            return Granted.KNOWN if lease.id.epoch == known else Granted.OUTDATED
        self._fence(key)
        # Remembered even if declined: the allocator's answer to that is a new epoch.
        self._remember(key, lease.id.epoch)
        if len(self) >= self.slots + self.prefetch:
            return Granted.NO_ROOM
        self._queued[key] = Attempt(lease, now)
        return Granted.QUEUED

    def start(self, held: Version | None) -> list[Attempt]:
        """The attempts to run now, under weights `held`, oldest grant first; they count as running."""
        free = self.slots - self.running
        if held is None or free <= 0:
            return []
        waiting = (key for key, attempt in self._queued.items() if attempt.lease.min_version <= held)
        ready = list(islice(waiting, free))
        for key in ready:
            self._running[key] = self._queued.pop(key)
            self._running[key].started = True
        return [self._running[key] for key in ready]

    def revoke(self, lease: LeaseId, reason: str) -> Attempt | None:
        """Stop this attempt and return it; None if it is not held (it has ended, or was never granted).

        A queued attempt is taken out: nobody will run it, the caller reports it. A running one learns of
        it from `stop_reason`.
        """
        key = _key(lease)
        if self.is_new(lease):
            # It overtook its grant, which must start nothing when it comes.
            self._fence(key)
            self._remember(key, lease.epoch)
            return None
        queued = self._queued.get(key)
        if queued is not None and queued.lease.id == lease:
            queued.stop(reason, revoked=True)
            return self._queued.pop(key)
        running = self._running.get(key)
        if running is not None and running.lease.id == lease:
            running.stop(reason, revoked=True)
            return running
        return self._stopping.get(lease)

    def is_new(self, lease: LeaseId) -> bool:
        """Whether neither this attempt nor a newer one was ever heard of."""
        return lease.epoch > self._epochs.get(_key(lease), -1)

    def end(self, lease: LeaseId) -> None:
        """An attempt that was started is over and its slot is free. Ending twice does nothing."""
        if self._stopping.pop(lease, None) is None:
            attempt = self._running.get(_key(lease))
            if attempt is not None and attempt.lease.id == lease:
                del self._running[_key(lease)]

    def waiting_for_weights(self, held: Version | None, now: float, share: float) -> list[Attempt]:
        """Take out queued attempts that waited `share` of their deadline for weights newer than `held`.

        Their holder gives them back before the allocator fences them.
        """
        stuck = [
            key
            for key, attempt in self._queued.items()
            if (held is None or attempt.lease.min_version > held)
            and now - attempt.granted_at > share * attempt.lease.deadline_s
        ]
        return [self._queued.pop(key) for key in stuck]

    def fenced(self) -> list[Attempt]:
        """Attempts that a newer one replaced before they started, since the last call: they have ended."""
        fenced, self._fenced = self._fenced, []
        return fenced

    def drain(self, reason: str, retry: bool) -> list[Attempt]:
        """Stop everything: running attempts are told, queued ones are returned for the caller to decline."""
        for attempt in self._running.values():
            attempt.stop(reason, retry=retry)
        queued = list(self._queued.values())
        self._queued.clear()
        return queued

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that hold a slot."""
        return [*self._running.values(), *self._stopping.values()]

    @property
    def running(self) -> int:
        """Slots in use."""
        return len(self._running) + len(self._stopping)

    @property
    def queued(self) -> int:
        """Leases held that have not started."""
        return len(self._queued)

    def __len__(self) -> int:
        return self.running + self.queued

    def _fence(self, key: Key) -> None:
        """Stop an older attempt at the same continuation: the allocator has given up on it."""
        queued, running = self._queued.pop(key, None), self._running.pop(key, None)
        for older in (queued, running):
            if older is not None:
                older.stop("fenced by a newer attempt", revoked=True)
        if queued is not None:
            self._fenced.append(queued)
        if running is not None:
            self._stopping[running.lease.id] = running

    def _remember(self, key: Key, epoch: int) -> None:
        self._epochs[key] = epoch
        self._epochs.move_to_end(key)
        while len(self._epochs) > REMEMBERED:
            self._epochs.popitem(last=False)


def _key(lease: LeaseId) -> Key:
    return lease.tree, lease.number
