"""Somebody who holds a session with the allocator, the allocator's words, and a clock of silence."""

from __future__ import annotations

from typing import Any

from common.codec import decode, encode
from common.errors import PeerLost
from common.messages import (
    PROTOCOL_VERSION,
    AllocatorToActor,
    Capabilities,
    Heartbeat,
    Hello,
    InspectFailed,
    Message,
    ToAllocator,
    Welcome,
)
from common.session import Caller, Session, Timing

TIMING = Timing(heartbeat_s=1.0, dead_after_s=4.0, lost_after_s=10.0)
"""All times here are sums of powers of two: they are exact."""
PATIENT = Timing(heartbeat_s=1.0, dead_after_s=1000.0, lost_after_s=1000.0)


def welcome(run: str = "run", timing: Timing = TIMING) -> Welcome:
    return Welcome(run, "", "", "", "", None, timing.heartbeat_s, timing.dead_after_s, 0, False)


def word(message: Message, name: str = "allocator/1") -> list[bytes]:
    return encode(message, run="run", sender=name)


def numbered(number: int) -> bytes:
    return number.to_bytes(16, "big")


def read(frames: list[bytes]) -> Any:
    """A message in few signs: its number, or the name of its type."""
    message = decode(frames, ToAllocator).message
    return message.tree if isinstance(message, InspectFailed) else type(message).__name__


class Side:
    """A session and what its caller was told."""

    def __init__(self, timing: Timing = TIMING, run: str = "", role: str = "actor") -> None:
        self.welcomes: list[bool] = []
        """For each, whether a session began with it."""
        self.refusal: Exception | None = None
        caller = Caller(
            role=role,
            sender="a/1",
            hears=AllocatorToActor,
            hello=lambda: Hello(role, "a", "1", PROTOCOL_VERSION, Capabilities(), {}),
            heartbeat=lambda: Heartbeat(7, 3),
            on_welcome=self._on_welcome,
        )
        self.session = Session(caller, "tcp://there:1", timing, run)
        self.count = 0

    def _on_welcome(self, _welcome: Welcome, begins: bool) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.welcomes.append(begins)

    def send(self, now: float) -> None:
        """`InspectFailed` of tree 0, 1, 2, …, under that number as its id."""
        msg_id = numbered(self.count)
        self.session.send(msg_id, self.session.encode(InspectFailed(self.count, "x"), msg_id), now)
        self.count += 1

    def written(self) -> list[Any]:
        """Take all that is queued."""
        return [read(frames) for frames in self.session.take()]


def opened(timing: Timing = TIMING, *, sends: int = 0, now: float = 0.0, **options: Any) -> Side:
    """It has a socket, and nobody has answered yet."""
    side = Side(timing, **options)
    side.session.open(now)
    for _ in range(sends):
        side.send(now)
    return side


def talking(timing: Timing = TIMING, *, sends: int = 0) -> Side:
    """Welcomed at 0, and all that was to be sent is on its way."""
    side = opened(timing, sends=sends)
    side.session.heard(word(welcome(timing=timing)), 0.0)
    side.written()
    return side


class Listening:
    """How long this process has listened in vain, counted literally, interval by interval."""

    def __init__(self, now: float) -> None:
        self.last, self.silence, self.socket = now, 0.0, 0.0

    def hear(self, now: float) -> None:
        self.socket += now - self.last
        self.last, self.silence = now, 0.0

    def agrees(self, session: Session, now: float) -> bool:
        """Tick, and check what comes of it; False when the peer is lost. A new socket is made where due."""
        listened = min(now - self.last, 2 * TIMING.beat_s)
        self.last = now
        self.silence += listened
        self.socket += listened
        try:
            goes_on = session.tick(now)
        except PeerLost:
            assert self.silence > TIMING.lost_after_s, "given up before its time"
            return False
        assert self.silence <= TIMING.lost_after_s, "not given up"
        assert goes_on == (min(self.silence, self.socket) <= TIMING.dead_after_s)
        if not goes_on:
            session.open(now)
            self.socket = 0.0
        return True
