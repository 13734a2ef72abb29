"""Who is there, what each actor holds, and who gets the next lease.

The next lease goes to the actor with the lowest load per slot, ties to the one that came first. A lazily
cleaned heap answers that without looking at the others: each change of load pushes a new entry and outdates
the old.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from allocator.tree import Branch
from common.messages import Capabilities
from common.nouns import LeaseId

ACTOR = "actor"
LEARNER = "learner"


@dataclass(slots=True, eq=False)
class Peer:
    """One process start of a peer: `key` is `name/incarnation`, what the transport calls the sender."""

    key: str
    role: str
    name: str
    incarnation: str
    capabilities: Capabilities
    order: int
    seen_at: float
    progress_at: float
    """Last time it got on with any lease: keeps its queued leases from expiring while it is busy."""
    alive: bool = True
    resting: bool = False
    """Gets nothing for a while, because it just declined."""
    queued: dict[Branch, None] = field(default_factory=dict)
    running: dict[Branch, None] = field(default_factory=dict)
    inspecting: dict[int, None] = field(default_factory=dict)
    stopping: dict[LeaseId, None] = field(default_factory=dict)
    """Leases taken from it that it may still be running: they fill their slots until it says they ended."""
    taken: dict[LeaseId, set[int]] = field(default_factory=dict)
    """Leases taken from it whose end it has not reported, each with the offsets of the turns that are
    accounted for: accepted before, or counted as crossed since."""
    stamp: int = 0
    room: int = 0

    def take(self, branch: Branch) -> None:
        """Whatever it says about this lease from now on is counted, and has no effect."""
        self.taken.setdefault(branch.id, set(range(len(branch.nodes))))

    @property
    def load(self) -> int:
        return len(self.queued) + len(self.running) + len(self.inspecting) + len(self.stopping)

    @property
    def surplus(self) -> int:
        """Queued leases that cannot start before others end."""
        return len(self.queued) - max(0, self.capabilities.slots - len(self.running))


class PeerTable:
    """All peers that said hello and were not replaced."""

    def __init__(self) -> None:
        self.members: dict[str, Peer] = {}
        self.by_name: dict[tuple[str, str], Peer] = {}
        self.retired: dict[str, None] = {}
        """Incarnations that were replaced or said goodbye: they may not come back."""
        self.free = 0
        """Leases that all usable actors together can still take."""
        self.idle: dict[Peer, None] = {}
        """Usable actors that hold nothing."""
        self.hoarding: dict[Peer, None] = {}
        """Actors that hold more than they can run."""
        self.actors_alive = 0
        self.learner: Peer | None = None
        self._heap: list[tuple[float, int, int, Peer]] = []
        self._orders = 0

    def add(self, key: str, role: str, name: str, incarnation: str, can: Capabilities, now: float) -> Peer:
        """A new incarnation; whoever had its name must have been retired before."""
        peer = Peer(key, role, name, incarnation, can, self._orders, now, now)
        self._orders += 1
        self.members[key] = self.by_name[role, name] = peer
        if role == LEARNER:
            self.learner = peer
        else:
            self.actors_alive += 1
        self.changed(peer)
        return peer

    def named(self, role: str, name: str) -> Peer | None:
        """The peer that a hello under this name replaces. All learners count as one."""
        return self.learner if role == LEARNER else self.by_name.get((role, name))

    def retire(self, peer: Peer) -> None:
        """Never to be heard again under this incarnation. Its leases must have been taken from it."""
        self.set_alive(peer, False)
        del self.members[peer.key]
        self.by_name.pop((peer.role, peer.name), None)
        self.retired[peer.key] = None
        if self.learner is peer:
            self.learner = None

    def set_alive(self, peer: Peer, alive: bool) -> None:
        if peer.role == ACTOR:
            self.actors_alive += alive - peer.alive
        peer.alive = alive
        self.changed(peer)

    def changed(self, peer: Peer) -> None:
        """Its load or its state changed: bring the indices up to date."""
        can, load = peer.capabilities, peer.load
        usable = can.slots > 0 and peer.alive and not peer.resting and peer.role == ACTOR
        room = max(0, can.slots + can.prefetch - load) if usable else 0
        self.free += room - peer.room
        peer.room = room
        peer.stamp += 1
        if room > 0:
            if len(self._heap) > 8 * len(self.members) + 1024:
                self._heap = [entry for entry in self._heap if entry[3].stamp == entry[2]]
                heapq.heapify(self._heap)
            heapq.heappush(self._heap, (load / can.slots, peer.order, peer.stamp, peer))
        if room > 0 and load == 0:
            self.idle[peer] = None
        elif peer in self.idle:
            del self.idle[peer]
        self.queue_changed(peer)

    def queue_changed(self, peer: Peer) -> None:
        """What waits there is another number of leases. If its load is, too, `changed` is to be called."""
        if peer.queued and peer.surplus > 0 and peer.role == ACTOR and peer.alive and not peer.resting:
            self.hoarding[peer] = None
        elif peer in self.hoarding:
            del self.hoarding[peer]

    def best(self) -> Peer | None:
        """The actor with most room per slot, None when nobody has any."""
        while self._heap:
            _, _, stamp, peer = self._heap[0]
            if peer.stamp == stamp:
                return peer
            heapq.heappop(self._heap)
        return None
