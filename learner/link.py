"""The learner's line to the allocator: a socket and the thread it lives in.

    training loop ─ send ─▶ given ─▶ session (until Durable) ─▶ DEALER ─▶ allocator
    training loop ◀─ events: Delivered, Welcomed, Dismissed, PeerLost ── DEALER ◀─ TreeReady, Bye

consumes: messages of the training loop.  produces: events, in order of arrival.
waits for: frames of the allocator.  unblocked by: a frame, a message to send, the next heartbeat or resend.

What is said when, what goes again and whose silence is too long is decided in `common.session`. The session
and the socket belong to this thread alone: what the training loop sends lies in `given` until the thread
takes it. After `dead_after_s` of silence the socket is thrown away for a new one; after `connect_timeout_s`
the event is a `PeerLost`. Heartbeats carry the training loop's progress, also in the middle of an update. A
tree is confirmed twice: at once as received, and as durable when the training loop has written it down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from common.codec import new_id
from common.config import ClusterConfig, SecurityConfig
from common.errors import TreewardError
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
from common.session import Caller, Session, Timing
from common.sockets import SocketFactory
from learner.wake import Wake


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
        self._endpoint, self._on_event = cluster.allocator, on_event
        caller = Caller(
            role="learner",
            sender=sender,
            hears=AllocatorToLearner,
            hello=hello,
            heartbeat=lambda: Heartbeat(progress=self.progress, running=self.running),
            on_welcome=self._on_welcome,
        )
        timing = Timing(cluster.heartbeat_s, cluster.dead_after_s, cluster.connect_timeout_s)
        self._session = Session(caller, cluster.allocator, timing, run)
        self._context: zmq.Context[Any] = zmq.Context()
        self._factory = SocketFactory(security, self._context)
        self._wake = Wake(self._context)
        self._given: deque[tuple[bytes | None, list[bytes]]] = deque()
        """From the training loop: to be delivered under an id, or (None) to be sent once."""
        self._closing = threading.Event()
        self._empty = threading.Condition()
        self.progress = 0
        """Grows with what the training loop does; told to the allocator."""
        self.running = 0
        """Trees held; told to the allocator."""
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    # --- for the training loop -----------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Deliver `message`, whatever happens to the line. Never blocks."""
        msg_id = new_id()
        self._give(msg_id, self._session.encode(message, msg_id))

    def durable(self, ids: list[bytes]) -> None:
        """These deliveries are written down: the allocator may forget its copies of the messages."""
        self._give(None, self._session.encode(Durable(ids)))

    def drain(self, timeout_s: float) -> bool:
        """Wait until all that was sent is durable at the allocator; False when that takes longer."""
        with self._empty:
            return self._empty.wait_for(self._is_drained, timeout_s)

    @property
    def sessions(self) -> int:
        """Sockets so far."""
        return self._session.sessions

    @property
    def bad_frames(self) -> int:
        """Messages that could not be read."""
        return self._session.bad_frames

    def close(self) -> None:
        """End the thread; what is still in the outbox is given up."""
        self._closing.set()
        self._wake.up()
        self._thread.join()
        self._wake.close()
        self._context.term()

    def _give(self, msg_id: bytes | None, frames: list[bytes]) -> None:
        self._given.append((msg_id, frames))
        self._wake.up()

    def _is_drained(self) -> bool:
        # In this order: what was given leaves `_given` only once it lies with the session.
        return not (self._given or self._session.undelivered or self._session.queue)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._hold_session()
        except Exception as error:  # noqa: BLE001 - no failure of this thread may go unnoticed
            self._on_event(error)
        finally:
            self._wake.receiver.close(0)

    def _hold_session(self) -> None:
        """One socket, from Hello to silence."""
        socket = self._factory.dealer(self._endpoint)
        self._session.open(time.monotonic())
        poller = zmq.Poller()
        poller.register(self._wake.receiver, zmq.POLLIN)
        try:
            while not self._closing.is_set() and self._session.tick(now := time.monotonic()):
                poller.register(socket, zmq.POLLIN | (zmq.POLLOUT if self._session.queue else 0))
                ready = dict(poller.poll(1 + int(1000 * self._session.patience(now))))
                self._wake.clear()
                if ready.get(socket, 0) & zmq.POLLIN:
                    self._receive(socket)
                self._take_given()
                self._flush(socket)
        finally:
            # What was not sent is either kept by the session or not worth waiting for.
            socket.close(0 if self._session.queue else None)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while socket.poll(0):
            envelope = self._session.heard(socket.recv_multipart(), time.monotonic())
            if envelope is not None:
                self._act(envelope.message, envelope.id)

    def _act(self, message: Any, msg_id: bytes) -> None:
        match message:
            case TreeReady(tree=tree):
                self._session.answer(Received([msg_id]))
                self._on_event(Delivered(tree, msg_id))
            case Bye():
                self._session.answer(Durable([msg_id]))
                self._on_event(Dismissed(message))

    def _on_welcome(self, _welcome: Welcome, begins: bool) -> None:
        # That a session began is all the training loop asks: what is in a Welcome it has said itself.
        if begins:
            self._on_event(Welcomed())

    def _take_given(self) -> None:
        """Move what the training loop gave into the session."""
        now = time.monotonic()
        while self._given:
            msg_id, frames = self._given[0]
            if msg_id is None:
                self._session.post(frames)
            else:
                self._session.send(msg_id, frames, now)
            self._given.popleft()

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        try:
            while self._session.queue:
                socket.send_multipart(self._session.queue[0], zmq.NOBLOCK)
                self._session.queue.popleft()
        except zmq.Again:  # no connection, or its queue is full: the poll says when to go on
            return
        finally:
            with self._empty:
                self._empty.notify_all()
