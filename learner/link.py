"""The learner's line to the allocator: a thread that keeps it alive, rebuilds it, and loses nothing on it.

    training loop ─ send ─▶ outbox (until Durable) ─▶ DEALER ─▶ allocator
    training loop ◀─ events: Delivered, Dismissed, PeerLost ── DEALER ◀─ TreeReady, Bye

consumes: messages of the training loop.  produces: events, in order of arrival.
waits for: frames of the allocator.  unblocked by: a frame, a message to send, the next heartbeat or resend.

The socket lives in this thread alone. A session begins with `Hello`; until `Welcome` answers it nothing else
is sent, then all that is not durable goes again, in order. After `dead_after_s` of silence the socket is
thrown away for a new one; after `connect_timeout_s` the event is a `PeerLost`. An allocator that is restarted
where it was is found by the socket; it is known by its name, and the session begins again. Heartbeats carry
the training loop's progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from common.codec import decode, encode, new_id
from common.config import ClusterConfig, SecurityConfig
from common.errors import PeerLost, ProtocolError, TreewardError
from common.logs import Repeats, fields
from common.messages import (
    AllocatorToLearner,
    Bye,
    Durable,
    Heartbeat,
    Hello,
    Message,
    Received,
    TreeReady,
    Welcome,
)
from common.nouns import Tree
from common.outbox import Outbox
from common.sockets import SocketFactory
from learner.wake import Wake

LOG = logging.getLogger("treeward.learner.link")

RESEND_S = 2.0
"""Without `Received` for this long, a message goes again."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """A tree arrived. Once it is written down, say `durable(id)`."""

    tree: Tree
    id: bytes


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The allocator is there (again)."""


class Dismissed(TreewardError):
    """The allocator said goodbye; `exit_code` is the one it asked for."""

    def __init__(self, bye: Bye) -> None:
        super().__init__(f"the allocator ended this learner: {bye.reason}")
        self.exit_code = bye.code


Event = Delivered | Welcomed | Exception


class AllocatorLink:
    """See the module docstring.

    Args:
        cluster: endpoint of the allocator and the bounds on waiting.
        security: of the run's sockets.
        sender: `name/incarnation` of this start of the learner.
        hello: makes the first message of each session.
        on_event: called in the link's thread with what happened; returns at once.
        run: the run this learner belongs to; an allocator of another run refuses it.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        security: SecurityConfig,
        sender: str,
        hello: Callable[[], Hello],
        on_event: Callable[[Event], None],
        run: str,
    ) -> None:
        self._endpoint, self._sender, self._hello, self._on_event = cluster.allocator, sender, hello, on_event
        self._heartbeat_s, self._dead_after_s = cluster.heartbeat_s, cluster.dead_after_s
        self._lost_after_s = cluster.connect_timeout_s
        self._context: zmq.Context[Any] = zmq.Context()
        self._factory = SocketFactory(security, self._context)
        self._wake = Wake(self._context)
        self._outbox = Outbox(RESEND_S)
        self._given: deque[tuple[bytes | None, list[bytes]]] = deque()
        self._queue: deque[list[bytes]] = deque()
        self._welcomed = False
        self._allocator = ""
        """Which process of it was heard last."""
        self._heard_at = self._beat_at = time.monotonic()
        self._closing = threading.Event()
        self._empty = threading.Condition()
        self._repeats = Repeats()
        self.run_id = run
        self.progress = 0
        """Grows with what the training loop does; told to the allocator."""
        self.running = 0
        """Trees held; told to the allocator."""
        self.sessions = self.bad_frames = 0
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # --- for the training loop -----------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Deliver `message`, whatever happens to the line. Never blocks."""
        msg_id = new_id()
        frames = encode(message, run=self.run_id, sender=self._sender, msg_id=msg_id)
        self._given.append((msg_id, frames))
        self._wake.up()

    def durable(self, ids: list[bytes]) -> None:
        """These deliveries are written down: the allocator may forget its copies of the messages."""
        self._given.append((None, encode(Durable(ids), run=self.run_id, sender=self._sender)))
        self._wake.up()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was sent is durable at the allocator; False when that takes longer."""
        with self._empty:
            return self._empty.wait_for(lambda: not (self._given or self._outbox or self._queue), timeout_s)

    def close(self) -> None:
        """End the thread; what is still in the outbox is given up."""
        self._closing.set()
        self._wake.up()
        self._thread.join()
        self._wake.close()
        self._context.term()

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self.sessions += 1
                self._session()
        except Exception as error:  # noqa: BLE001 - no failure of this thread may go unnoticed
            self._on_event(error)
        finally:
            self._wake.receiver.close(0)

    def _session(self) -> None:
        """One socket, from Hello to silence."""
        socket = self._factory.dealer(self._endpoint)
        opened_at = time.monotonic()
        self._welcomed = False
        self._queue.clear()
        self._put(self._hello())
        poller = zmq.Poller()
        poller.register(self._wake.receiver, zmq.POLLIN)
        try:
            while not self._closing.is_set() and not self._is_dead(opened_at):
                poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._queue else 0))
                before, patience = time.monotonic(), self._patience()
                ready = dict(poller.poll(1 + int(1000 * patience)))
                # A process that was stopped could not hear anything: that time is nobody's silence.
                self._heard_at += max(0.0, time.monotonic() - before - patience - self._heartbeat_s)
                self._wake.clear()
                if ready.get(socket, 0) & zmq.POLLIN:
                    self._receive(socket)
                self._take_given()
                self._keep_alive()
                self._flush(socket)
        finally:
            # Unsent frames are either in the outbox or not worth waiting for.
            socket.close(0 if self._queue else None)

    def _patience(self) -> float:
        """Seconds until something is due."""
        due = min(self._beat_at + self._heartbeat_s, self._outbox.next_due() if self._welcomed else 1e300)
        return max(0.0, min(due - time.monotonic(), self._heartbeat_s))

    def _is_dead(self, opened_at: float) -> bool:
        """Whether this session is over.

        Raises:
            PeerLost: the allocator has been silent for too long.
        """
        now = time.monotonic()
        silence = now - self._heard_at
        if silence > self._lost_after_s:
            raise PeerLost(
                f"no allocator has answered at {self._endpoint} for {self._lost_after_s:g} s "
                "(cluster.connect_timeout_s); start one there, or correct cluster.allocator"
            )
        dead = min(silence, now - opened_at) > self._dead_after_s
        if dead:
            LOG.warning("the allocator is silent for %.1f s; connecting anew", silence)
        return dead

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            frames = socket.recv_multipart()
            self._heard_at = time.monotonic()
            try:
                envelope = decode(frames, AllocatorToLearner)
            except ProtocolError as error:
                self._bad_frame(error)
                continue
            self._notice(envelope.sender)
            self._dispatch(envelope.message, envelope.id)

    def _notice(self, sender: str) -> None:
        """Another process of the allocator than before knows neither this learner nor what it has said."""
        if sender == self._allocator:
            return
        if self._allocator and self._welcomed:
            LOG.info("the allocator was restarted")
            self._welcomed = False
            self._put(self._hello())
        self._allocator = sender

    def _dispatch(self, message: Any, msg_id: bytes) -> None:
        match message:
            case Received(ids=ids):
                self._outbox.received(ids)
            case Durable(ids=ids):
                self._outbox.durable(ids)
            case Welcome():
                self._welcome(message)
            case TreeReady(tree=tree):
                self._put(Received([msg_id]))
                self._on_event(Delivered(tree, msg_id))
            case Bye():
                self._put(Durable([msg_id]))
                self._on_event(Dismissed(message))

    def _welcome(self, welcome: Welcome) -> None:
        if self.run_id != welcome.run:
            raise ProtocolError(
                f"the allocator at {self._endpoint} now serves run {welcome.run!r}, this learner belongs to "
                f"{self.run_id!r}; start a learner for the new run"
            )
        self._heartbeat_s, self._dead_after_s = welcome.heartbeat_s, welcome.dead_after_s
        if not self._welcomed:
            self._welcomed = True
            self._outbox.reset(time.monotonic())
            self._on_event(Welcomed())

    def _take_given(self) -> None:
        """Move what the training loop gave into the outbox, and on to the socket once welcomed."""
        now = time.monotonic()
        if self._welcomed:
            self._queue.extend(self._outbox.due(now))
        while self._given:
            msg_id, frames = self._given[0]
            if msg_id is not None:
                self._outbox.add(msg_id, frames, now)
            if self._welcomed:
                self._queue.append(frames)
            self._given.popleft()
        with self._empty:
            self._empty.notify_all()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now < self._beat_at + self._heartbeat_s:
            return
        self._beat_at = now
        if self._queue:  # nothing gets through now: more would only pile up
            return
        if self._welcomed:
            self._put(Heartbeat(progress=self.progress, running=self.running))
        if not self._welcomed or now - self._heard_at > self._dead_after_s / 2:
            self._put(self._hello())

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while self._queue:
                socket.send_multipart(self._queue[0], zmq.NOBLOCK)
                self._queue.popleft()
        except zmq.Again:  # no connection, or its queue is full: the poll says when to go on
            return

    def _put(self, message: Message) -> None:
        self._queue.append(encode(message, run=self.run_id, sender=self._sender))

    def _bad_frame(self, error: ProtocolError) -> None:
        self.bad_frames += 1
        held_back = self._repeats.allow("bad_frame", time.monotonic())
        if held_back is not None:
            LOG.warning(
                "ignored a damaged message: %s", error, extra=fields("bad_frame", held_back=held_back)
            )
