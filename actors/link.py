"""The actor's line to the allocator: a socket and the tasks that read, write and watch it.

    send ─▶ session (until Durable) ─▶ writer ─▶ DEALER ─▶ allocator
                                                 DEALER ─▶ reader ─▶ session ─▶ on_message, then Durable

consumes: messages to send.  produces: calls of `on_welcome` and `on_message`, in order of arrival.
waits for: the allocator.  unblocked by: any frame from it, or silence: after `dead_after_s` the socket is
thrown away for a new one, and after `lost_after_s` without a word `run` raises `PeerLost`.

What is said when, what goes again and whose silence is too long is decided in `common.session`. Here is what
needs an event loop: one task reads the socket, one writes, one tells the time. The journal is the actor's
own: it is written before anything is sent, and what arrived is confirmed as durable after that only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from common.codec import new_id
from common.messages import MAX_BATCH, AllocatorToActor, Durable, Heartbeat, Hello, Message, Welcome
from common.session import Caller, Session, Timing
from common.sockets import SocketFactory

__all__ = ["Handlers", "Link", "Timing"]


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
        self._factory, self._endpoint, self._handlers = factory, endpoint, handlers
        caller = Caller(
            role="actor",
            sender=sender,
            hears=AllocatorToActor,
            hello=handlers.hello,
            heartbeat=handlers.heartbeat,
            on_welcome=self._welcomed,
        )
        self._session = Session(caller, endpoint, timing)
        self._acks: list[bytes] = []
        self._leaving: deque[list[bytes]] = deque()
        """What the writer is sending; the journal was written before it."""
        self._wake = asyncio.Event()
        self._rhythm = asyncio.Event()
        """Set when the time between heartbeats may have changed."""
        # Random once and then counted: asking the system for randomness each time costs a call a message.
        self._id_prefix, self._sent = new_id()[:8], 0

    def _welcomed(self, welcome: Welcome, _begins: bool) -> None:
        """Every one counts, not only the first: `greet` asks for what has changed."""
        self._handlers.on_welcome(welcome)
        self._rhythm.set()

    def send(self, message: Message) -> None:
        """Deliver `message`, whatever happens to the line. Raises `ProtocolError` if nobody would take it."""
        self._sent += 1
        msg_id = self._id_prefix + self._sent.to_bytes(8, "big")
        self._session.send(msg_id, self._session.encode(message, msg_id), self._now())
        self._stir()

    def post(self, message: Message) -> None:
        """Send `message` once, if there is a line."""
        self._session.post(self._session.encode(message))
        self._stir()

    def greet(self) -> None:
        """Say `Hello` again on this line, to be told what has changed since the last `Welcome`."""
        self._session.greet()
        self._stir()

    @property
    def undelivered(self) -> int:
        """Messages that the allocator has not made durable."""
        return self._session.undelivered

    @property
    def sessions(self) -> int:
        """Sockets so far."""
        return self._session.sessions

    @property
    def bad_frames(self) -> int:
        """Messages that could not be read."""
        return self._session.bad_frames

    async def run(self) -> None:
        """Hold the line for ever.

        Raises:
            PeerLost: no word from the allocator for `lost_after_s`.
            ProtocolError: another run answers at its endpoint.
        """
        while True:
            await self._hold_session()

    async def drain(self, timeout_s: float) -> bool:
        """Wait until everything sent is durable; False if that takes longer than `timeout_s`."""
        deadline = self._now() + timeout_s
        while (self.undelivered or self._acks or self._unsent) and self._now() < deadline:
            await asyncio.sleep(0.01)
        return not self.undelivered

    # --- one session -------------------------------------------------------------------------------------

    async def _hold_session(self) -> None:
        """One socket, from Hello to silence."""
        socket = self._factory.dealer(self._endpoint)
        self._acks.clear()
        self._leaving.clear()
        self._session.open(self._now())
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
            # What was not sent is either kept by the session or not worth waiting for.
            socket.close(0 if self._unsent else None)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            envelope = self._session.heard(frames, self._now())
            if envelope is not None:
                self._handlers.on_message(envelope.message)
                self._acks.append(envelope.id)
            self._stir()

    async def _write(self, socket: zmq.asyncio.Socket) -> None:
        """Returns when the socket has had no connection for its send timeout: the session is over."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._handlers.before_write()
            # What is said while these leave waits until the journal is written again.
            self._leaving.extend((*self._acknowledgements(), *self._session.take()))
            try:
                while self._leaving:
                    await socket.send_multipart(self._leaving[0])
                    self._leaving.popleft()
            except zmq.Again:
                return

    async def _tick(self) -> None:
        """Returns when the allocator is silent: the session is over."""
        while self._session.tick(self._now()):
            self._stir()
            self._rhythm.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._rhythm.wait(), self._session.patience(self._now()))

    def _acknowledgements(self) -> list[list[bytes]]:
        acks, self._acks = self._acks, []
        return [
            self._session.encode(Durable(acks[start : start + MAX_BATCH]))
            for start in range(0, len(acks), MAX_BATCH)
        ]

    def _stir(self) -> None:
        """Wake the writer if there is something to write."""
        if self._session.queue or self._acks:
            self._wake.set()

    @property
    def _unsent(self) -> bool:
        return bool(self._session.queue or self._leaving)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
