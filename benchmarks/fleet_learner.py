"""The learner of a simulated fleet: updates that take time, checkpoints, crashes. See `benchmarks.fleet`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.fleet_line import Line
from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Dropped,
    Heartbeat,
    Hello,
    Message,
    TreeReady,
)
from common.nouns import Version

if TYPE_CHECKING:
    from benchmarks.fleet import Fleet


class SimLearner:
    """Trains on whole batches in the order of arrival; commits every few updates; may crash and resume."""

    def __init__(self, fleet: Fleet, incarnation: int, version: Version, done: set[int]) -> None:
        self.fleet = fleet
        self.incarnation = incarnation
        self.version = version
        self.line = Line(fleet, f"learner/{incarnation}")
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
        self._give_credit(self.fleet.config.credit or 2 * batch)
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
            self.fleet.after(self.fleet.config.beat_s, self._beat)

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
