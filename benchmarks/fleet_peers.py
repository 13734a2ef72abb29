"""The peers of a simulated fleet: actors and a learner that exist only as events. See `benchmarks.fleet`.

They behave as the real ones do towards the allocator: a lease is run turn by turn under its own seed, a
revoked one stops within a turn, whatever is not acknowledged is sent again in order, and a learner resumes
from its newest checkpoint.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Declined,
    Dropped,
    Expanded,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Message,
    Revoke,
    Starting,
    TreeReady,
)
from common.nouns import (
    Ending,
    Lease,
    LeaseId,
    Outcome,
    RewardSource,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
)
from common.seeds import turn_seed

if TYPE_CHECKING:
    from benchmarks.fleet import Fleet

ROOT_TURN = Turn(observation=b"\1\0\0\0\2\0\0\0", state_hash="root")


class Sender:
    """One end of a line to the allocator: in order, repeated until acknowledged."""

    def __init__(self, fleet: Fleet, key: str) -> None:
        self.fleet = fleet
        self.key = key
        self.unacked: dict[int, Message] = {}
        self._next = 0
        self._timer = False
        self._last_arrival = 0.0
        self.alive = True

    def send(self, message: Message) -> None:
        number = self._next
        self._next += 1
        self.unacked[number] = message
        self._transmit(number)
        if not self._timer:
            self._timer = True
            self.fleet.after(self.fleet.config.resend_s, self._resend)

    def _transmit(self, number: int) -> None:
        fleet, message = self.fleet, self.unacked[number]
        faults = fleet.config.faults
        copies = 1 + (fleet.rng.random() < faults.duplicated)
        for _ in range(copies):
            if fleet.rng.random() >= faults.lost:
                arrival = max(self._last_arrival, fleet.now + fleet.latency())
                if fleet.rng.random() < faults.reordered:
                    arrival += fleet.rng.expovariate(1 / fleet.config.turn_s)
                else:
                    self._last_arrival = arrival
                fleet.after(arrival - fleet.now, lambda: self._arrive(number, message))

    def _arrive(self, number: int, message: Message) -> None:
        if self.fleet.deliver(self.key, message).ack:
            self.unacked.pop(number, None)

    def _resend(self) -> None:
        self._timer = False
        if not self.alive or not self.unacked:
            return
        for number in list(self.unacked):
            self._transmit(number)
        self._timer = True
        self.fleet.after(self.fleet.config.resend_s, self._resend)


class SimActor:
    """Runs leases: each turn takes a random time; the outcome depends on the lease's seed only."""

    def __init__(self, fleet: Fleet, name: str, incarnation: int) -> None:
        self.fleet = fleet
        self.name = name
        self.incarnation = incarnation
        self.line = Sender(fleet, f"{name}/{incarnation}")
        self.queued: deque[Lease] = deque()
        self.running: dict[LeaseId, Lease] = {}
        self.revoked: set[LeaseId] = set()
        self.frozen_until = 0.0
        self.seen: set[LeaseId] = set()
        fleet.peers[self.line.key] = self

    def join(self) -> None:
        config = self.fleet.config
        can = Capabilities(slots=config.slots, prefetch=config.prefetch)
        self.line.send(Hello("actor", self.name, str(self.incarnation), PROTOCOL_VERSION, can, {}))
        self._beat()
        life = config.faults.actor_life_s
        if life:
            self.fleet.after(self.fleet.rng.expovariate(1 / life), self.crash)

    def crash(self) -> None:
        """The process dies; another one takes its name after a while."""
        if self.fleet.over or not self.line.alive:
            return
        self.line.alive = False
        self.fleet.counts["actor_crashes"] += 1
        heir = SimActor(self.fleet, self.name, self.incarnation + 1)
        self.fleet.after(self.fleet.rng.uniform(0.5, 15.0), heir.join)

    def _beat(self) -> None:
        if self.line.alive and not self.fleet.over:
            if self.fleet.now >= self.frozen_until:
                self.fleet.after(self.fleet.latency(), self._pulse)
            self.fleet.after(1.0, self._beat)

    def _pulse(self) -> None:
        self.fleet.deliver(self.line.key, Heartbeat(0, len(self.running)))

    def receive(self, message: Message) -> None:
        if not self.line.alive:
            return
        match message:
            case Grant(leases=leases):
                for lease in leases:
                    if lease.id not in self.seen:
                        self.seen.add(lease.id)
                        self.queued.append(lease)
                self._start()
            case Revoke(lease=lease_id):
                self._revoke(lease_id)
            case Inspect(tree=tree, task=task):
                self.line.send(Inspected(tree, task, ROOT_TURN))
            case Bye():
                for lease in [*self.running.values(), *self.queued]:
                    self.line.send(Failed(lease.id, "run ended", False))
                self.line.alive = False

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

    def _start(self) -> None:
        while self.queued and len(self.running) < self.fleet.config.slots:
            lease = self.queued.popleft()
            if self.fleet.rng.random() < self.fleet.config.faults.declined:
                self.line.send(Declined(lease.id, "drill"))
                continue
            self.running[lease.id] = lease
            if lease.offset >= self._turns(lease):
                self._end(lease, Finished(lease.id, lease.offset, self._outcome(lease)))
                continue
            self.line.send(Starting(lease.id, lease.min_version))
            self._schedule(lease, lease.offset)

    def _schedule(self, lease: Lease, offset: int) -> None:
        fleet, config = self.fleet, self.fleet.config
        if fleet.rng.random() < config.faults.actor_pause:
            self.frozen_until = max(fleet.now, self.frozen_until) + config.faults.pause_s
            fleet.counts["pauses"] += 1
        took = fleet.rng.expovariate(1 / config.turn_s)
        fleet.after(max(took, self.frozen_until - fleet.now), lambda: self._turn(lease, offset))

    def _turn(self, lease: Lease, offset: int) -> None:
        if not self.line.alive:
            return
        fleet = self.fleet
        if fleet.now < self.frozen_until:
            fleet.after(self.frozen_until - fleet.now, lambda: self._turn(lease, offset))
            return
        if lease.id in self.revoked:
            self.revoked.discard(lease.id)
            self._end(lease, Failed(lease.id, "revoked", False, 1))
            return
        if fleet.rng.random() < fleet.config.faults.failed:
            self._end(lease, Failed(lease.id, "drill", True, 1))
            return
        last = offset + 1 >= self._turns(lease)
        self.line.send(Expanded(lease.id, offset, sample_turn(lease, offset, last)))
        if last:
            self._end(lease, Finished(lease.id, offset + 1, self._outcome(lease)))
        else:
            self._schedule(lease, offset + 1)

    def _end(self, lease: Lease, message: Message) -> None:
        del self.running[lease.id]
        self.line.send(message)
        self._start()

    def _turns(self, lease: Lease) -> int:
        """Turns of the continuation: at least one, at most what the episode allows at that depth."""
        left = max(1, self.fleet.config.max_turns - (lease.depth - lease.offset))
        return 1 + lease.seed % left

    def _outcome(self, lease: Lease) -> Outcome:
        reward = reward_of(lease)
        return Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)


def reward_of(lease: Lease) -> float:
    """Half of the continuations succeed; the last turn pays."""
    return float(lease.seed >> 20 & 1)


def sample_turn(lease: Lease, offset: int, last: bool) -> Turn:
    """A turn of one token, drawn from the lease's seed and the offset."""
    seed = turn_seed(lease.seed, offset)
    return Turn(
        action=(seed & 0xFF).to_bytes(4, "little"),
        logprobs=b"\0\0\0\0",
        versions=[VersionRun(lease.min_version, 1)],
        observation=b"\3\0\0\0",
        seed=seed,
        reward=reward_of(lease) if last else 0.0,
        status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
        state_hash="s",
    )


class SimLearner:
    """Trains on whole batches in the order of arrival; commits every few updates; may crash and resume."""

    def __init__(self, fleet: Fleet, incarnation: int, version: Version, done: set[int]) -> None:
        self.fleet = fleet
        self.incarnation = incarnation
        self.version = version
        self.line = Sender(fleet, f"learner/{incarnation}")
        self.queue: list[int] = []
        self.known: set[int] = set()
        self.trained: list[tuple[int, int]] = []
        self.committed = done
        """Trees in the newest checkpoint."""
        self.busy = False
        self.credit = 0
        fleet.peers[self.line.key] = self

    def join(self) -> None:
        batch = self.fleet.core.state.settings.batch_trees
        self.line.send(
            Hello(
                "learner", "learner", str(self.incarnation), PROTOCOL_VERSION, Capabilities(), {},
                weights_endpoint="tcp://w", version=self.version,
            )
        )  # fmt: skip
        self._give_credit(2 * batch)
        self._beat()
        if self.version.step == self.fleet.core.state.settings.steps:
            self._leave()
        life = self.fleet.config.faults.learner_life_s
        if life:
            self.fleet.after(self.fleet.rng.expovariate(1 / life), self.crash)

    def crash(self) -> None:
        """The process dies and resumes from its newest checkpoint."""
        if self.fleet.over or not self.line.alive:
            return
        self.line.alive = False
        self.fleet.counts["learner_crashes"] += 1
        at = Version(self.version.lineage + 1, self.fleet.checkpoint_step)
        heir = SimLearner(self.fleet, self.incarnation + 1, at, set(self.committed))
        self.fleet.learner = heir
        self.fleet.after(self.fleet.rng.uniform(1.0, 20.0), heir.join)

    def _beat(self) -> None:
        if self.line.alive and not self.fleet.over:
            self.fleet.after(self.fleet.latency(), self._pulse)
            self.fleet.after(1.0, self._beat)

    def _pulse(self) -> None:
        self.fleet.deliver(self.line.key, Heartbeat(self.version.step, 0))

    def receive(self, message: Message) -> None:
        if self.line.alive and isinstance(message, TreeReady):
            tree = message.tree.id
            if tree in self.committed:
                self.line.send(Committed(self.version, [tree]))
            elif tree not in self.known:
                self.known.add(tree)
                if self.fleet.rng.random() < self.fleet.config.faults.tree_stale:
                    self.line.send(Dropped(tree, "stale"))
                    self._give_credit(1)
                else:
                    self.queue.append(tree)
            self._work()

    def _work(self) -> None:
        batch = self.fleet.core.state.settings.batch_trees
        if not self.busy and len(self.queue) >= batch:
            self.busy = True
            trees, self.queue = self.queue[:batch], self.queue[batch:]
            self.fleet.after(self.fleet.config.step_s, lambda: self._updated(trees))

    def _updated(self, trees: list[int]) -> None:
        if not self.line.alive:
            return
        self.busy = False
        step = self.version.step + 1
        self.version = Version(self.version.lineage, step)
        self.trained += [(tree, step) for tree in trees]
        self.line.send(Consumed(trees, self.version))
        last = step == self.fleet.core.state.settings.steps
        if last or step % self.fleet.config.commit_every == 0:
            self.committed |= {tree for tree, _ in self.trained}
            self.fleet.checkpoint_step = step
            self.line.send(Committed(self.version, [tree for tree, _ in self.trained]))
            self.trained = []
        if last:
            self._leave()
        else:
            self._give_credit(len(trees))
        self._work()

    def _give_credit(self, trees: int) -> None:
        self.credit += trees
        self.line.send(Credit(self.credit))

    def _leave(self) -> None:
        """Goodbye once everything said has arrived."""
        if self.line.unacked:
            self.fleet.after(0.1, self._leave)
        elif self.line.alive:
            self.line.send(Bye(0, "done"))
