"""The actor's line to the allocator: kept alive, rebuilt when it is silent, and nothing lost on it.

    send ─▶ outbox (until Durable) ─┐
    post ──────────────────────────▶ queue ─▶ writer ─▶ DEALER ─▶ allocator
                                                        DEALER ─▶ reader ─▶ on_message, then Durable

consumes: messages to send.  produces: calls of `on_welcome` and `on_message`, in order of arrival.
waits for: the allocator.  unblocked by: any frame from it, or silence: after `dead_after_s` the socket is
thrown away for a new one, and after `lost_after_s` without a word `run` raises `PeerLost`.

A session begins with `Hello`; until `Welcome` answers it, nothing else is sent. Then everything that is not
durable goes again, in order: the allocator may be a new process. The socket finds one by itself that listens
where the old one did; whatever it says bears its name, which is not the old one's, and the session begins
again. One task reads the socket and one writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from common.codec import decode, encode, new_id
from common.errors import PeerLost, ProtocolError
from common.logs import Repeats, fields
from common.messages import (
    MAX_BATCH,
    AllocatorToActor,
    Durable,
    Heartbeat,
    Hello,
    Message,
    Received,
    Welcome,
)
from common.outbox import Outbox
from common.sockets import SocketFactory

LOG = logging.getLogger("treeward.actor.link")

RESEND_S = 2.0
"""Without `Received` for this long, a message goes again."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; the first two are the allocator's once it has said `Welcome`."""

    heartbeat_s: float
    dead_after_s: float
    lost_after_s: float
    """`cluster.connect_timeout_s`: how long a role waits for its peers before it gives up."""


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the link calls; all return at once."""

    hello: Callable[[], Hello]
    heartbeat: Callable[[], Heartbeat]
    on_welcome: Callable[[Welcome], None]
    on_message: Callable[[Any], None]
    """`Inspect`, `Grant`, `Revoke`, `Bye`; acknowledged as durable after it and `before_write` returned."""
    before_write: Callable[[], None]
    """Called before anything is sent: the journal is written first."""


class Link:
    """See the module docstring. Everything here runs in one event loop."""

    def __init__(
        self,
        factory: SocketFactory[zmq.asyncio.Socket],
        endpoint: str,
        sender: str,
        handlers: Handlers,
        timing: Timing,
    ) -> None:
        self._factory, self._endpoint, self._sender = factory, endpoint, sender
        self._handlers, self._timing = handlers, timing
        self._outbox = Outbox(RESEND_S)
        self._queue: deque[list[bytes]] = deque()
        self._acks: list[bytes] = []
        self._wake = asyncio.Event()
        self._welcomed = False
        self._allocator = ""
        """Which process of it was heard last."""
        self._heard_at = 0.0
        self._repeats = Repeats()
        # Random once and then counted: asking the system for randomness each time costs a call a message.
        self._id_prefix, self._sent = new_id()[:8], 0
        self.run_id = ""
        """Name of the run, from the first `Welcome`."""
        self.bad_frames = self.sessions = 0

    def send(self, message: Message) -> None:
        """Deliver `message`, whatever happens to the line. Raises `ProtocolError` if nobody would take it."""
        self._sent += 1
        msg_id = self._id_prefix + self._sent.to_bytes(8, "big")
        frames = encode(message, run=self.run_id, sender=self._sender, msg_id=msg_id)
        self._outbox.add(msg_id, frames, self._now())
        if self._welcomed:
            self._put(frames)

    def post(self, message: Message) -> None:
        """Send `message` once, if there is a line."""
        if self._welcomed:
            self._put(encode(message, run=self.run_id, sender=self._sender))

    def greet(self) -> None:
        """Say `Hello` again on this line, to be told what has changed since the last `Welcome`."""
        if self._welcomed and not self._queue:
            self._put(self._hello())

    @property
    def undelivered(self) -> int:
        """Messages that the allocator has not made durable."""
        return len(self._outbox)

    async def run(self) -> None:
        """Hold the line for ever.

        Raises:
            PeerLost: no word from the allocator for `lost_after_s`.
            ProtocolError: another run answers at its endpoint.
        """
        self._heard_at = self._now()
        while True:
            self.sessions += 1
            await self._session()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything sent is durable; False if that takes longer than `timeout_s`."""
        deadline = self._now() + timeout_s
        while (self._outbox or self._queue or self._acks) and self._now() < deadline:
            await asyncio.sleep(0.01)
        return not self._outbox

    # --- one session -------------------------------------------------------------------------------------

    async def _session(self) -> None:
        """One socket, from Hello to silence."""
        socket = self._factory.dealer(self._endpoint)
        self._welcomed = False
        self._acks.clear()
        self._queue.clear()
        self._put(self._hello())
        tasks = [
            asyncio.create_task(self._read(socket), name="link-read"),
            asyncio.create_task(self._write(socket), name="link-write"),
            asyncio.create_task(self._tick(), name="link-tick"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # What was queued on this socket is either in the outbox or not worth waiting for.
            socket.close(0 if self._queue else None)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self._heard_at = self._now()
            try:
                envelope = decode(frames, AllocatorToActor)
            except ProtocolError as error:
                self._bad_frame(error)
                continue
            self._notice(envelope.sender)
            self._dispatch(envelope.message, envelope.id)

    def _notice(self, sender: str) -> None:
        """Another process of the allocator than before knows neither this actor nor what it has said."""
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
            case _:
                self._handlers.on_message(message)
                self._acks.append(msg_id)
                self._wake.set()

    def _welcome(self, welcome: Welcome) -> None:
        if self.run_id not in ("", welcome.run):
            raise ProtocolError(
                f"the allocator at {self._endpoint} now serves run {welcome.run!r}, this actor belongs to "
                f"{self.run_id!r}; start a new actor for the new run"
            )
        self.run_id = welcome.run
        self._timing = Timing(welcome.heartbeat_s, welcome.dead_after_s, self._timing.lost_after_s)
        first, self._welcomed = not self._welcomed, True
        self._handlers.on_welcome(welcome)
        if first:
            self._outbox.reset(self._now())
            self._resend()

    async def _write(self, socket: zmq.asyncio.Socket) -> None:
        """Returns when the socket has had no connection for its send timeout: the session is over."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._handlers.before_write()
            self._acknowledge()
            try:
                while self._queue:
                    await socket.send_multipart(self._queue[0])
                    self._queue.popleft()
            except zmq.Again:
                return

    async def _tick(self) -> None:
        """Heartbeats, resends, and the watch over silence."""
        opened_at = self._now()
        while True:
            interval = min(self._timing.heartbeat_s, self._timing.dead_after_s / 4)
            before = self._now()
            await asyncio.sleep(interval)
            # A process that was stopped could not hear anything: that time is nobody's silence.
            self._heard_at += max(0.0, self._now() - before - 2 * interval)
            silence = self._now() - self._heard_at
            if silence > self._timing.lost_after_s:
                raise PeerLost(
                    f"no allocator has answered at {self._endpoint} for {self._timing.lost_after_s:g} s "
                    "(cluster.connect_timeout_s); start one there, or correct cluster.allocator"
                )
            if min(silence, self._now() - opened_at) > self._timing.dead_after_s:
                LOG.warning("the allocator is silent for %.1f s; connecting anew", silence)
                return
            if self._welcomed:
                self.post(self._handlers.heartbeat())
                self._resend()
            if not self._queue and (not self._welcomed or silence > self._timing.dead_after_s / 2):
                self._put(self._hello())

    def _hello(self) -> list[bytes]:
        return encode(self._handlers.hello(), run=self.run_id, sender=self._sender)

    def _resend(self) -> None:
        for frames in self._outbox.due(self._now()):
            self._put(frames)

    def _acknowledge(self) -> None:
        while self._acks:
            ids, self._acks = self._acks[:MAX_BATCH], self._acks[MAX_BATCH:]
            self._queue.appendleft(encode(Durable(ids), run=self.run_id, sender=self._sender))

    def _put(self, frames: list[bytes]) -> None:
        self._queue.append(frames)
        self._wake.set()

    def _bad_frame(self, error: ProtocolError) -> None:
        self.bad_frames += 1
        held_back = self._repeats.allow("bad_frame", self._now())
        if held_back is not None:
            LOG.warning(
                "ignored a damaged message: %s", error, extra=fields("bad_frame", held_back=held_back)
            )

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
