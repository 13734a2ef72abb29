"""The socket loop around the core: the only file of this room that knows ZeroMQ and clocks.

    ROUTER ─▶ decode ─▶ core ─▶ journal ─▶ write ─▶ send, Received        every round
                                              └─ sync (≤ journal_flush_ms) ─▶ Durable, now and then a snapshot

    consumes      frames of actors and the learner, time
    produces      journal records, then sends; snapshots; metrics
    waits for     frames, at most until the next tick or sync is due
    unblocked by  any peer, the clock, SIGTERM

Nothing is sent before the records of what led to it are written, so that no actor ever knows an epoch that
the journal does not; nothing is confirmed as durable before it is synced, and no finished tree leaves before
it: if the machine died, another tree could get its number. One thread, one socket.

After a restart (`recovery`) peers go on talking as if nothing had happened. They are strangers until they say
hello, and a word with this process's name on it makes them do so at once.
"""

from __future__ import annotations

import errno
import logging
import math
import signal
import time
from collections import Counter
from types import FrameType

import zmq

from allocator.core import AllocatorCore, Send
from allocator.delivery import TreeState
from allocator.endings import NOT_SELECTED
from allocator.lines import Lines
from allocator.recovery import Recovery
from allocator.replay import INPUTS
from allocator.snapshots import Snapshots
from common.codec import Envelope, decode, encode, new_sender
from common.errors import PeerLost, ProtocolError
from common.journal import JournalWriter
from common.logs import Repeats, fields
from common.messages import (
    Bye,
    Dropped,
    Durable,
    Heartbeat,
    Hello,
    Message,
    Received,
    ToAllocator,
    TreeReady,
)
from common.metrics import MetricsClient
from common.traffic import TRAFFIC
from common.usage import usage

LOG = logging.getLogger("treeward.allocator")

TICK_S = 0.2
"""Time steps of the core: well below a heartbeat, so that grants and deadlines come when they are due."""
RESEND_CHECK_S = 0.5
METRICS_S = 2.0
PATIENCE_S = 10.0
"""After this much waiting for a peer the log says what is waited for, and again every so often."""
DRAIN_S = 5.0
"""Longest wait for actors to hand back what they hold when the run is over."""
FAREWELL_S = 0.3
"""The socket stays open this long after the last word: with ZMQ_IMMEDIATE a peer whose connection breaks
loses what it has not read yet."""
BURST = 512
"""Frames handled before anything is written and sent: bounds both the wait of a reply and the writes."""
TREE_HURRY = 0.2
"""Share of the usual time between two syncs after which a tree that waits for one gets it."""
STOPPED = 6
"""Code told to peers when the allocator itself is stopped: they cannot go on without it."""


class AllocatorLoop:
    """Runs `core` behind a bound ROUTER until the run is over.

    Args:
        router: bound, ROUTER_MANDATORY, never blocking on send.
        flush_s: longest time an input stays unsynced, hence unconfirmed as durable.
        recovery: what `core` was taken up from, if it is not a fresh one.
        snapshots: of the core; None = none are taken.
    """

    def __init__(
        self,
        core: AllocatorCore,
        router: zmq.Socket[bytes],
        journal: JournalWriter,
        metrics: MetricsClient,
        flush_s: float,
        recovery: Recovery | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.core, self.router, self.journal, self.metrics = core, router, journal, metrics
        self.run_id = core.state.settings.run
        self.lines = Lines(self.run_id, new_sender("allocator"), self._transmit)
        self.counts: Counter[str] = Counter()
        """Frames by what became of them."""
        self.seconds = {"waiting": 0.0, "working": 0.0}
        """Spent waiting for frames, and working on them."""
        self.waited: Counter[str] = Counter()
        """Of the waiting, seconds by what the core waited for."""
        self.stop_signal = 0
        self.recovery = recovery or Recovery(core)
        self.snapshots = snapshots
        self._ahead_s = max(0.0, self.recovery.now - time.monotonic())
        self._flush_s = flush_s
        self._unsynced_since: float | None = None
        self._synced_at = 0.0
        self._due = {"tick": 0.0, "resend": 0.0, "metrics": 0.0}
        self._sends: list[Send] = []
        self._trees: list[Send] = []
        """To be sent once the journal is synced."""
        self._repeats = Repeats(PATIENCE_S)
        self._waiting_since = 0.0

    def run(self) -> int:
        """Serve until the run is over; returns the exit code.

        Raises:
            PeerLost: the learner is gone for good.
            StorageError: the journal cannot be written.
        """
        now = self._waiting_since = self._now()
        self.recovery.begin(self.journal, now, run=self.run_id, sender=self.lines.sender)
        self._expect_confirmations()
        # Of a run that was complete when the allocator died, everybody still waits for its goodbye.
        awaited = self.core.ending is not None
        while self.core.ending is None:
            self.round()
        LOG.info("ending: %s", self.core.ending.reason, extra=fields("ending"))
        drained_at = self._now() + DRAIN_S
        while (awaited or self.core.live_leases or self.lines.unconfirmed) and self._now() < drained_at:
            self.round()
        return self._end()

    def _expect_confirmations(self) -> None:
        """Trees that an earlier process sent are on the wire until a learner says otherwise."""
        for tree, parcel in self.core.state.delivery.parcels.items():
            if parcel.sent and parcel.state is not TreeState.CONSUMED:
                self.lines.under_way(tree)

    def _now(self) -> float:
        """The core's clock: monotonic, and never behind what the journal has."""
        return time.monotonic() + self._ahead_s

    def listen_for_signals(self) -> None:
        """SIGTERM and SIGINT end the run in order; the second one at once."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self.stop_signal:
                raise KeyboardInterrupt
            self.stop_signal = number

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    def round(self) -> None:
        """One round: wait for frames or the clock, handle, write, send."""
        began, reason = self._now(), self.core.waiting()
        frames_wait = bool(self.router.poll(self._timeout_ms(began)))
        woke = self._now()
        if self.stop_signal and self.core.ending is None:
            self._take(self.core.stop(STOPPED, "the allocator was stopped", woke))
        if frames_wait:
            self._receive_burst()
        self._clock(self._now())
        self._write_and_send()
        self._snapshot_if_due()
        self.seconds["waiting"] += woke - began
        self.waited[reason] += woke - began  # type: ignore[assignment] # typeshed counts in whole numbers
        self.seconds["working"] += self._now() - woke

    def _timeout_ms(self, now: float) -> int:
        """Until the next thing that time alone brings."""
        due = min(*self._due.values(), self._sync_due())
        return int(1000 * (due - now)) + 1 if due > now else 0

    def _end(self) -> int:
        """Write down what is still out, confirm all that was said, and leave."""
        self._sync()
        ending, state = self.core.ending, self.core.state
        assert ending is not None
        trees = [*state.forest.trees, *state.delivery.parcels]
        live = [b.id for tree in state.forest.trees.values() for b in tree.branches.values() if b.live]
        leases = [[lease.tree, lease.number, lease.epoch] for lease in live]
        wire = sorted(state.delivery.parcels.keys() & set(self.lines.on_the_wire.values()))
        self._report()
        self.journal.append("end", in_flight_trees=trees, in_flight_leases=leases, on_the_wire_trees=wire)
        self._sync()
        if self.snapshots is not None:
            self.snapshots.close()
        time.sleep(FAREWELL_S)
        if ending.code == 0 or self.stop_signal:
            return 0
        raise PeerLost(ending.reason)

    # --- in ----------------------------------------------------------------------------------------------

    def _receive_burst(self) -> None:
        for _ in range(BURST):
            try:
                route, *frames = self.router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(route, frames)

    def _receive(self, route: bytes, frames: list[bytes]) -> None:
        try:
            envelope = decode(frames, ToAllocator)
        except ProtocolError as error:
            self.counts["rejected"] += 1
            self._warn("bad_frame", f"ignored a damaged message: {error}")
            return
        if envelope.run in ("", self.run_id):
            self.counts["received"] += 1
            self._handle(route, envelope)
            return
        self.counts["wrong_run"] += 1
        reason = (
            f"this allocator serves run {self.run_id!r}, not {envelope.run!r}: start a new process for it"
        )
        self._transmit(route, encode(Bye(5, reason), run=self.run_id, sender=self.lines.sender))

    def _handle(self, route: bytes, envelope: Envelope) -> None:
        message, key, now = envelope.message, envelope.sender, self._now()
        if isinstance(message, Received | Durable):
            self.lines.confirmed(key, message.ids)
            if isinstance(message, Durable):
                self.lines.written(message.ids)
            return
        line = self.lines.heard(key, route, hello=isinstance(message, Hello), now=now)
        if line is None:
            # It may have been let in by an earlier process of this allocator: now it knows of the new one.
            self.counts["strangers"] += 1
            self._transmit(route, encode(Received([]), run=self.run_id, sender=self.lines.sender))
            return
        self._input(key, message, now)
        handled = self.core.handle(key, message, now)
        self._take(handled.sends)
        if handled.ack:
            line.received.append(envelope.id)
            if not isinstance(message, Heartbeat):
                line.durable.append(envelope.id)
        if isinstance(message, Hello):
            self._log_hello(message, handled.sends)

    def _log_hello(self, hello: Hello, sends: list[Send]) -> None:
        key = f"{hello.peer}/{hello.incarnation}"
        refusal = next(
            (s.message.reason for s in sends if isinstance(s.message, Bye) and s.peer == key), None
        )
        if refusal is None:
            LOG.info("%s %s says hello", hello.role, hello.peer, extra=fields("hello", peer=key))
        else:
            LOG.warning(
                "refused %s %s: %s", hello.role, hello.peer, refusal, extra=fields("refused", peer=key)
            )

    # --- time --------------------------------------------------------------------------------------------

    def _clock(self, now: float) -> None:
        if now >= self._due["tick"]:
            self._due["tick"] = now + TICK_S
            self._take(self.core.tick(now))
            self._say_what_is_waited_for(now)
        if now >= self._due["resend"]:
            self._due["resend"] = now + RESEND_CHECK_S
            self.lines.resend(now)
        if now >= self._due["metrics"]:
            self._due["metrics"] = now + METRICS_S
            self._report()

    def _say_what_is_waited_for(self, now: float) -> None:
        reason = self.core.waiting()
        if reason not in ("learner", "actors"):
            self._waiting_since = now
        elif now - self._waiting_since > PATIENCE_S:
            who = "a learner" if reason == "learner" else "actors"
            self._warn(f"waiting_{reason}", f"waiting for {who} for {now - self._waiting_since:.0f} s")

    def _report(self) -> None:
        values = self.core.stats()
        counts = self.counts + self.lines.counts
        values |= {f"frames/{name}": float(count) for name, count in counts.items()}
        values["frames/unconfirmed"] = self.lines.unconfirmed
        values["loop/working_share"] = self.seconds["working"] / (sum(self.seconds.values()) or 1.0)
        values |= {f"loop/waited_{reason}_s": seconds for reason, seconds in self.waited.items()}
        values |= {f"loop/{name}": total for name, total in TRAFFIC.totals().items()}
        self.journal.append("usage", **usage(time.monotonic(), self.seconds, waited=dict(self.waited)))
        values |= self.snapshots.stats() if self.snapshots is not None else {}
        values["loop/restarts"] = self.recovery.boot
        self.metrics.log(int(values["work/step"]), **values)

    def _warn(self, event: str, sentence: str) -> None:
        held_back = self._repeats.allow(event, self._now())
        if held_back is not None:
            LOG.warning("%s", sentence, extra=fields(event, held_back=held_back))

    # --- out ---------------------------------------------------------------------------------------------

    def _input(self, key: str, message: Message, now: float) -> None:
        """Journal a message before the core sees it."""
        self.journal.append("input", peer=key, now=now, message=message)
        if self.snapshots is not None:
            self.snapshots.count_input()
        if self._unsynced_since is None:
            self._unsynced_since = now

    def _take(self, sends: list[Send]) -> None:
        """What the core decided: journal it now, send it after the journal is written."""
        for kind, values in self.core.take_records():
            self.journal.append(kind, **values)
            if kind in INPUTS and self.snapshots is not None:
                self.snapshots.count_input()
            if kind == "tree_dropped" and values["reason"] != NOT_SELECTED:
                self._warn("tree_dropped", f"tree {values['tree']} dropped: {values['reason']}")
        self._sends += sends

    def _write_and_send(self) -> None:
        now = self._now()
        self.journal.flush(sync=False)
        while self._sends:
            batch, self._sends = self._sends, []
            for send in batch:
                if isinstance(send.message, TreeReady):
                    self._trees.append(send)
                    self.lines.under_way(send.message.tree.id)
                else:
                    self._send(send, now)
            self.journal.flush(sync=False)
        self.lines.confirm_received()
        for key in self.core.take_departed():
            fate = "has left" if self.core.ending else "is gone; its work goes on elsewhere"
            LOG.info("%s %s", key, fate, extra=fields("departed", peer=key))
            self.lines.gone(key, for_good=not self.core.knows(key))
        if now >= self._sync_due():
            self._sync()

    def _sync_due(self) -> float:
        """When the journal is to be synced: soon after an input; for a tree at once, unless that was just
        now."""
        input_due = math.inf if self._unsynced_since is None else self._unsynced_since + self._flush_s
        return min(input_due, self._synced_at + TREE_HURRY * self._flush_s) if self._trees else input_due

    def _send(self, send: Send, now: float) -> None:
        try:
            self.lines.send(send.peer, send.message, now)
        except ProtocolError as error:
            self.counts["unsendable"] += 1
            LOG.error("cannot send to %s: %s", send.peer, error, extra=fields("unsendable"))
            if isinstance(send.message, TreeReady):
                dropped = Dropped(send.message.tree.id, "too large to send")
                self._input(send.peer, dropped, now)
                self._take(self.core.handle(send.peer, dropped, now).sends)
        if isinstance(send.message, Bye) and not self.core.knows(send.peer):
            self.lines.gone(send.peer, for_good=True)

    def _snapshot_if_due(self) -> None:
        """A restart begins with the newest snapshot, and replays what the journal has behind it."""
        now = self._now()
        if self.snapshots is not None and self.snapshots.due(self.journal.end, now):
            self._sync()
            self.journal.flush(sync=True)
            self.snapshots.take(self.core, self.journal.end, now)

    def _sync(self) -> None:
        """On disk: only now may peers forget what they said, and finished trees leave."""
        self.journal.flush(sync=True)
        self._unsynced_since, self._synced_at = None, self._now()
        self.lines.confirm_durable()
        trees, self._trees = self._trees, []
        for send in trees:
            self._send(send, self._synced_at)
        self.journal.flush(sync=False)

    def _transmit(self, route: bytes, frames: list[bytes]) -> bool:
        """False when the peer is gone. A full queue is no loss: what matters is repeated."""
        try:
            self.router.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.Again:
            self.counts["queue_full"] += 1
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True
