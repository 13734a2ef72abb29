"""From the allocator's deliveries to batches: queue, journal, credit and acknowledgements in one place.

consumes: events of the link.  produces: batches of trees; `Credit`, `Dropped`, `Durable` for the allocator.
waits for: trees, for as long as the allocator is alive (its loss is an event).  unblocked by: any event.
"""

from __future__ import annotations

import logging
import time
from queue import Empty, SimpleQueue

from common.journal import JournalWriter
from common.messages import Committed, Credit, Dropped
from common.nouns import Tree
from learner.link import AllocatorLink, Delivered, Event, Welcomed
from learner.queue import Drop, TreeQueue
from learner.report import Stopwatch
from learner.rows import Clock

LOG = logging.getLogger("treeward.learner")

WAITING_LINE_S = 30.0
"""A wait that lasts is said so once in this long: no silent hang."""


class Stop:
    """Put among the events by a signal handler: finish what is in hand and end."""


class Intake:
    """Owns the way in. Used by the training loop alone.

    Args:
        queue: holds the trees.
        link: to the allocator.
        events: what the link and the signal handlers put.
        journal: of the learner.
        watch: told how long was waited, and for whom.
        settled: trees inside the checkpoint that this start resumed from.
    """

    def __init__(
        self,
        queue: TreeQueue,
        link: AllocatorLink,
        events: SimpleQueue[Event | Stop],
        journal: JournalWriter,
        watch: Stopwatch,
        settled: frozenset[int] = frozenset(),
    ) -> None:
        self._queue, self._link, self._events = queue, link, events
        self._journal, self._watch, self._settled = journal, watch, settled
        self._unwritten: list[bytes] = []
        self._delivered: set[int] = set()
        self._credit = -1
        self._welcomed = False
        self.stopping = False

    def next_batch(self, clock: Clock) -> list[Tree]:
        """Block until a batch is complete; empty when the run is to stop first.

        Raises:
            PeerLost, Dismissed, ProtocolError: what ended the link.
        """
        said = time.monotonic()
        while True:
            self.take_in(clock)
            if self.stopping:
                return []
            batch, drops = self._queue.take(clock)
            for drop in drops:
                self._drop(drop)
            self._give_credit()
            if batch:
                return batch
            self._wait(clock)
            if time.monotonic() - said > WAITING_LINE_S:
                said = time.monotonic()
                LOG.info("waiting for %s", self.waiting_for())

    def take_in(self, clock: Clock) -> None:
        """All that has arrived, without waiting; then acknowledge and give credit."""
        while not self._events.empty():
            self._handle(self._events.get(), clock)
        if self._unwritten:
            self._journal.flush(sync=False)
            self._link.durable(self._unwritten)
            self._unwritten = []
        self._give_credit()

    def waiting_for(self) -> str:
        """What a batch lacks, in words."""
        if not self._welcomed:
            return "the allocator's welcome"
        return f"trees: {len(self._queue)} of {self._queue.batch_trees} are here"

    def _wait(self, clock: Clock) -> None:
        on = "wait_trees_s" if self._welcomed else "wait_allocator_s"
        try:
            with self._watch.timed(on):
                event = self._events.get(timeout=WAITING_LINE_S)
        except Empty:
            return
        self._handle(event, clock)

    def _handle(self, event: Event | Stop, clock: Clock) -> None:
        match event:
            case Stop():
                self.stopping = True
            case Welcomed():
                self._welcomed = True
            case Delivered(tree=tree, id=msg_id):
                self._deliver(tree, clock)
                self._unwritten.append(msg_id)
            case Exception():
                raise event

    def _deliver(self, tree: Tree, clock: Clock) -> None:
        self._delivered.add(tree.id)
        if tree.id in self._settled:
            # An earlier start trained it, and its word did not reach the allocator.
            self._link.send(Committed(version=clock.current, trees=[tree.id]))
        elif not self._queue.seen(tree.id):
            self._journal.append("received", tree=tree.id, tokens=tree.num_action_tokens())
        drop = self._queue.offer(tree, clock)
        if drop is not None:
            self._drop(drop)

    def _drop(self, drop: Drop) -> None:
        self._journal.append(
            "dropped", tree=drop.tree, reason=drop.reason, tokens=drop.tokens,
            branches=drop.branches, turns=drop.mean_turns, success=drop.success,
        )  # fmt: skip
        like = f"{drop.mean_turns:.1f} turns and success {drop.success:.3f} on average"
        LOG.info("tree %d dropped, %s: %d branches, %s", drop.tree, drop.reason, drop.branches, like)
        self._link.send(Dropped(tree=drop.tree, reason=drop.reason))

    def _give_credit(self) -> None:
        """Cumulative since this start of the learner: what came, and what there is room for."""
        total = len(self._delivered) + self._queue.room
        if total > self._credit:
            self._credit = total
            self._link.send(Credit(total))
