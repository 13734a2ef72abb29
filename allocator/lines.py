"""The allocator's end of each line: what a peer has not confirmed, and what it is to be told it confirmed.

    send ─▶ outbox (until Received or Durable) ─▶ transmit     acks: Received at once, Durable after the sync

Routes are ROUTER ids; a peer that reconnects has a new one. A line is opened by a hello; nothing is kept for
senders that never said one. No socket here: `transmit` is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from common.codec import encode, new_id
from common.messages import MAX_BATCH, Durable, Message, Received, TreeReady, Welcome
from common.outbox import Outbox

RESEND_S = 2.0
"""A local round trip takes milliseconds, a busy actor's turn a second."""

Transmit = Callable[[bytes, list[bytes]], bool]
"""Hands frames to a route; False when the peer behind it is gone."""


@dataclass(slots=True)
class Line:
    """One incarnation of a peer. `route` is None while it cannot be reached."""

    key: str
    route: bytes | None
    outbox: Outbox = field(default_factory=lambda: Outbox(RESEND_S))
    received: list[bytes] = field(default_factory=list)
    """Ids to confirm as held in memory."""
    durable: list[bytes] = field(default_factory=list)
    """Ids to confirm as written, once the journal is synced."""


class Lines:
    """All lines, by peer key."""

    def __init__(self, run: str, sender: str, transmit: Transmit) -> None:
        self.run, self.sender = run, sender
        self.by_key: dict[str, Line] = {}
        self.counts: Counter[str] = Counter()
        self.on_the_wire: dict[bytes, int] = {}
        """Trees by the newest message they left in, until a learner says that it is written down there."""
        self._transmit = transmit

    @property
    def unconfirmed(self) -> int:
        """Messages that some peer within reach has not confirmed."""
        return sum(len(line.outbox) for line in self.by_key.values() if line.route is not None)

    def heard(self, key: str, route: bytes, *, hello: bool, now: float) -> Line | None:
        """A message came from `key` by `route`. A hello opens the line, or has all sent again."""
        line = self.by_key.get(key)
        if line is None:
            if not hello:
                return None
            line = self.by_key[key] = Line(key, route)
        line.route = route
        if hello:
            line.outbox.reset(now)
        return line

    def confirmed(self, key: str, ids: list[bytes]) -> None:
        """The peer holds these. That is enough: if its process dies, the core issues anew what it held."""
        line = self.by_key.get(key)
        if line is not None:
            line.outbox.durable(ids)

    def written(self, ids: list[bytes]) -> None:
        """The peer has these on record: trees among them have arrived."""
        for msg_id in ids:
            self.on_the_wire.pop(msg_id, None)

    def gone(self, key: str, *, for_good: bool) -> None:
        """What the peer has not confirmed goes elsewhere: forget it, and maybe the line too."""
        if for_good:
            self.by_key.pop(key, None)
        elif key in self.by_key:
            self.by_key[key].outbox = Outbox(RESEND_S)

    def send(self, key: str, message: Message, now: float) -> None:
        """Send, and keep until confirmed. `Welcome` is not kept: its hello is repeated until it comes.

        Raises:
            ProtocolError: the message cannot be sent to anybody (too large).
        """
        line = self.by_key.get(key)
        if line is None:
            return
        msg_id = new_id()
        frames = encode(message, run=self.run, sender=self.sender, msg_id=msg_id)
        if not isinstance(message, Welcome):
            line.outbox.add(msg_id, frames, now)
        if isinstance(message, TreeReady):
            self.under_way(message.tree.id, msg_id)
        self._put(line, frames)

    def under_way(self, tree: int, msg_id: bytes = b"") -> None:
        """A tree leaves, is about to, or left an earlier process: until its arrival is known it is on the
        wire."""
        others = {m: t for m, t in self.on_the_wire.items() if t != tree}
        self.on_the_wire = others | {msg_id or new_id(): tree}

    def resend(self, now: float) -> None:
        """Send again what is due, to those who can be reached."""
        for line in self.by_key.values():
            if line.route is not None and len(line.outbox):
                for frames in line.outbox.due(now):
                    self.counts["resent"] += 1
                    self._put(line, frames)

    def confirm_received(self) -> None:
        """Tell every peer what is held of its messages."""
        for line in self.by_key.values():
            if line.received:
                line.received = self._confirm(line, line.received, Received)

    def confirm_durable(self) -> None:
        """Tell every peer what is on disk of its messages. Call after a sync only."""
        for line in self.by_key.values():
            if line.durable:
                line.durable = self._confirm(line, line.durable, Durable)

    def _confirm(self, line: Line, ids: list[bytes], kind: type[Received] | type[Durable]) -> list[bytes]:
        """One that is lost is made up for: its sender repeats itself, and is confirmed again."""
        for start in range(0, len(ids), MAX_BATCH):
            message = kind(ids[start : start + MAX_BATCH])
            self._put(line, encode(message, run=self.run, sender=self.sender))
        return []

    def _put(self, line: Line, frames: list[bytes]) -> None:
        if line.route is None:
            return
        self.counts["sent"] += 1
        if not self._transmit(line.route, frames):
            self.counts["unreachable"] += 1
            line.route = None
