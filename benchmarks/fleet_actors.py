"""The actors of a simulated fleet: leases run turn by turn in a simulated world. See `benchmarks.fleet`.

    Grant ─▶ queued ─▶ running ─▶ turn ─▶ Expanded … ─▶ Finished | HorizonReached      a slot each
                          └─ Revoke: stops when its turn ends; a failed turn: Failed(retry)

A lease is run under its own seed, so what it yields does not depend on who runs it, when, or at which
attempt."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from benchmarks.fleet_line import Line
from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Declined,
    Expanded,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    HorizonReached,
    Inspect,
    Inspected,
    Message,
    Revoke,
    Starting,
)
from common.nouns import Lease, LeaseId, Turn, TurnStatus, Version

if TYPE_CHECKING:
    from benchmarks.fleet import Fleet


class SimActor:
    """Runs leases as a real actor does towards the allocator; its worlds and its clock are simulated."""

    def __init__(self, fleet: Fleet, name: str, incarnation: int) -> None:
        self.fleet = fleet
        self.world = fleet.world
        self.name = name
        self.incarnation = incarnation
        self.line = Line(fleet, f"{name}/{incarnation}")
        self.queued: deque[Lease] = deque()
        self.running: dict[LeaseId, Lease] = {}
        self.revoked: set[LeaseId] = set()
        self.frozen_until = 0.0
        self.seen: set[LeaseId] = set()
        self.version = Version(0, 0)
        """Newest weights it was told of, and samples with."""
        fleet.peers[self.line.key] = self

    def join(self) -> None:
        config = self.fleet.config
        can = Capabilities(
            slots=config.slots, prefetch=config.prefetch, process_scores=self.world.process_scores
        )
        self.line.send(Hello("actor", self.name, str(self.incarnation), PROTOCOL_VERSION, can, {}))
        self._beat()
        life = config.faults.actor_life_s
        if life:
            self.fleet.after(self.fleet.rng.expovariate(1 / life), self.crash)

    def crash(self) -> None:
        """The process dies; another one takes its name after a while."""
        if self.fleet.over or not self.line.alive:
            return
        self._leave()
        self.fleet.counts["actor_crashes"] += 1
        heir = SimActor(self.fleet, self.name, self.incarnation + 1)
        self.fleet.after(self.fleet.rng.uniform(0.5, 15.0), heir.join)

    def _leave(self) -> None:
        self.line.alive = False
        self.fleet.occupy(-len(self.running))

    def _beat(self) -> None:
        if self.line.alive and not self.fleet.over:
            if self.fleet.now >= self.frozen_until:
                self.fleet.after(self.fleet.latency(), self._pulse)
            self.fleet.after(self.fleet.config.beat_s, self._beat)

    def _pulse(self) -> None:
        self.fleet.deliver(self.line.key, Heartbeat(0, len(self.running)))

    # --- what it is told ---------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        if not self.line.alive:
            return
        match message:
            case Grant(leases=leases, version=version):
                self.version = max(self.version, version)
                for lease in leases:
                    if lease.id not in self.seen:
                        self.seen.add(lease.id)
                        self.queued.append(lease)
                self._start()
            case Revoke(lease=lease_id):
                self._revoke(lease_id)
            case Inspect(tree=tree, task=task):
                self.line.send(Inspected(tree, task, self.world.root(task)))
            case Bye():
                for lease in [*self.running.values(), *self.queued]:
                    self.line.send(Failed(lease.id, "run ended", False))
                self._leave()

    def _revoke(self, lease_id: LeaseId) -> None:
        if lease_id in self.running:
            self.revoked.add(lease_id)
            return
        held = [lease for lease in self.queued if lease.id == lease_id]
        for lease in held:
            self.queued.remove(lease)
        if held or lease_id not in self.seen:
            self.seen.add(lease_id)
            self.line.send(Failed(lease_id, "revoked", False))

    # --- leases ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        while self.queued and len(self.running) < self.fleet.config.slots:
            lease = self.queued.popleft()
            if self.fleet.rng.random() < self.fleet.config.faults.declined:
                self.line.send(Declined(lease.id, "drill"))
                continue
            self.running[lease.id] = lease
            self.fleet.occupy(1)
            over = self.world.over(lease)
            if over is not None:
                self._end(lease, Finished(lease.id, lease.offset, over))
                continue
            self.line.send(Starting(lease.id, max(self.version, lease.min_version)))
            self._schedule(lease, lease.offset, lease.snapshot)

    def _schedule(self, lease: Lease, offset: int, state: bytes | None) -> None:
        """Sample the next turn; it is there when its time has passed."""
        fleet, config = self.fleet, self.fleet.config
        if fleet.rng.random() < config.faults.actor_pause:
            self.frozen_until = max(fleet.now, self.frozen_until) + config.faults.pause_s
            fleet.counts["pauses"] += 1
        turn = self.world.turn(lease, offset, state, max(self.version, lease.min_version))
        took = self.world.seconds(lease, offset, turn) * config.turn_s
        fleet.after(max(took, self.frozen_until - fleet.now), lambda: self._turn(lease, offset, turn))

    def _turn(self, lease: Lease, offset: int, turn: Turn) -> None:
        if not self.line.alive:
            return
        fleet = self.fleet
        if fleet.now < self.frozen_until:
            fleet.after(self.frozen_until - fleet.now, lambda: self._turn(lease, offset, turn))
            return
        tokens = turn.num_action_tokens
        if lease.id in self.revoked:
            self.revoked.discard(lease.id)
            self._end(lease, Failed(lease.id, "revoked", False, tokens))
        elif fleet.rng.random() < fleet.config.faults.failed:
            self._end(lease, Failed(lease.id, "drill", True, tokens))
        else:
            self.line.send(Expanded(lease.id, offset, turn))
            self._next(lease, offset + 1, turn)

    def _next(self, lease: Lease, turns: int, turn: Turn) -> None:
        if turn.status is not TurnStatus.OPEN:
            self._end(lease, Finished(lease.id, turns, self.world.outcome(lease, turn)))
        elif turns == lease.horizon:
            self._end(lease, HorizonReached(lease.id, turns))
        else:
            self._schedule(lease, turns, turn.snapshot)

    def _end(self, lease: Lease, message: Message) -> None:
        del self.running[lease.id]
        self.fleet.occupy(-1)
        self.line.send(message)
        self._start()
