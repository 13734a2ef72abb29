"""What a sender must keep until its receiver has it: a pure state machine, time is an argument.

    add ──▶ waiting ──received──▶ held ──durable──▶ forgotten
              ▲  │                 │
          due └──┘◀──── reset ─────┘

A `send` that succeeds says only that the bytes are in local memory. So each message is sent once by the
caller when it is added, again every `resend_s` until the receiver says `Received`, now and then until it
says `Durable` (that word too may be lost), and is kept until then. A reconnect or a new incarnation of the
receiver calls `reset`: what is not durable goes again, in the order in which it was added. Receivers are
idempotent, so repeats do no harm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Kept:
    frames: list[bytes]
    due_at: float
    """When it goes again."""
    received: bool = False
    """Since it was last sent."""


UNHURRIED = 5
"""Resend intervals by which a received message waits longer: its `Durable` comes with the next sync."""


class Outbox:
    """Messages sent and not yet durable at the receiver. `len(outbox)` counts them."""

    def __init__(self, resend_s: float = 2.0) -> None:
        self._resend_s = resend_s
        self._kept: dict[bytes, _Kept] = {}

    def add(self, msg_id: bytes, frames: Sequence[bytes], now: float) -> None:
        """Keep a message that the caller sends now. An id that is already kept stays as it is."""
        self._kept.setdefault(msg_id, _Kept(list(frames), now + self._resend_s))

    def received(self, ids: Iterable[bytes]) -> None:
        """The receiver holds these in memory: keep them, and ask again only if no `Durable` comes."""
        for msg_id in ids:
            kept = self._kept.get(msg_id)
            if kept is not None and not kept.received:
                kept.received = True
                kept.due_at += UNHURRIED * self._resend_s

    def durable(self, ids: Iterable[bytes]) -> None:
        """The receiver has written these down: forget them. Unknown ids are ignored."""
        for msg_id in ids:
            self._kept.pop(msg_id, None)

    def due(self, now: float) -> list[list[bytes]]:
        """Messages to send again now, in the order they were added; each is next due `resend_s` later."""
        found = [kept for kept in self._kept.values() if kept.due_at <= now]
        for kept in found:
            kept.due_at, kept.received = now + self._resend_s, False
        return [kept.frames for kept in found]

    def next_due(self) -> float:
        """When `due` next has something; infinite when nothing waits."""
        return min((kept.due_at for kept in self._kept.values()), default=math.inf)

    def reset(self, now: float) -> None:
        """The receiver may have lost its memory: everything not durable is due at once."""
        for kept in self._kept.values():
            kept.due_at, kept.received = now, False

    def __len__(self) -> int:
        return len(self._kept)
