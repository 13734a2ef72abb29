"""A session with the allocator: what may be said when, what goes again, and when silence is too long.

    open ─▶ Hello ··· Welcome ─▶ all that is not durable, in order ─▶ what is new, heartbeats
              ▲          │
              └──────────┴── another process of the allocator answers: the session begins again
    tick ─▶ False after `dead_after_s` of silence: a new socket, and `open` again
         ─▶ PeerLost after `lost_after_s`

Actors and the learner hold it alike; their links own the socket and drive this object. Until `Welcome`
answers, nothing is sent but `Hello` and answers to what arrives (a `Bye` may come instead). A socket finds by
itself an allocator that was started where the old one was; whatever that says bears its name, which is not
the old one's. One that takes the caller for a stranger says so with an empty `Received`. Any frame breaks the
silence, a damaged one too. A process that was stopped, or too busy to listen, heard nothing: that time is
nobody's silence.

No socket, clock, thread or task here: time is an argument, and what is to be sent lies in `queue`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.codec import Envelope, decode, encode
from common.errors import OtherProtocol, PeerLost, ProtocolError
from common.logs import Repeats, fields
from common.messages import Durable, Heartbeat, Hello, Message, Received, Welcome
from common.outbox import Outbox

LOG = logging.getLogger("treeward.session")

RESEND_S = 2.0
"""Without `Received` for this long, a message goes again."""
BEATS_IN_A_LIFE = 4
"""Within `dead_after_s` at least so many heartbeats are sent, however few the allocator asked for."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds; the first two are the allocator's once it has said `Welcome`."""

    heartbeat_s: float
    dead_after_s: float
    lost_after_s: float
    """`cluster.connect_timeout_s`: how long a role waits for its peers before it gives up."""

    @property
    def beat_s(self) -> float:
        """Time between two heartbeats."""
        return min(self.heartbeat_s, self.dead_after_s / BEATS_IN_A_LIFE)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who holds the session, and what it has to say of itself. Its functions return at once."""

    role: str
    sender: str
    """`name/incarnation` of this start of the process."""
    hears: Any
    """Union of what the allocator may say to it."""
    hello: Callable[[], Hello]
    heartbeat: Callable[[], Heartbeat]
    on_welcome: Callable[[Welcome, bool], None]
    """Each `Welcome` of the run, and whether a session begins with it. What it raises keeps the session from
    beginning: nothing is sent to an allocator that it refuses."""


class Session:
    """See the module docstring. Call `open` for every new socket, then `tick` at least every `patience`.

    Args:
        caller: the side that holds it.
        endpoint: where the allocator is, for messages to people.
        timing: until the allocator says its own.
        run: the run that the caller belongs to; empty: that of the first `Welcome`.
    """

    def __init__(self, caller: Caller, endpoint: str, timing: Timing, run: str = "") -> None:
        self._caller, self._endpoint, self._timing = caller, endpoint, timing
        self._outbox = Outbox(RESEND_S)
        self._allocator = ""
        """Which process of it was heard last."""
        self._opened_at = self._beat_at = self._heard_at = self._ticked_at = 0.0
        self._repeats = Repeats()
        self.run = run
        self.queue: deque[list[bytes]] = deque()
        """For the socket, oldest first."""
        self.welcomed = False
        self.sessions = self.bad_frames = 0

    @property
    def undelivered(self) -> int:
        """Messages that the allocator has not made durable."""
        return len(self._outbox)

    # --- what the caller says ------------------------------------------------------------------------------

    def encode(self, message: Message, msg_id: bytes | None = None) -> list[bytes]:
        """Frames of `message`. Raises `ProtocolError` if nobody would take it. Any thread may call this."""
        return encode(message, run=self.run, sender=self._caller.sender, msg_id=msg_id)

    def send(self, msg_id: bytes, frames: list[bytes], now: float) -> None:
        """Deliver a message, whatever happens to the line."""
        self._outbox.add(msg_id, frames, now)
        self.post(frames)

    def post(self, frames: list[bytes]) -> None:
        """Send once, if there is a session."""
        if self.welcomed:
            self.queue.append(frames)

    def answer(self, message: Message) -> None:
        """Send once, to whoever is there: something that it said is confirmed."""
        self.queue.append(self.encode(message))

    def greet(self) -> None:
        """Say `Hello` again in this session, to be told what has changed since the last `Welcome`."""
        if self.welcomed and not self.queue:
            self._hello()

    def take(self) -> deque[list[bytes]]:
        """All that is queued; it is the link's from here on."""
        taken, self.queue = self.queue, deque()
        return taken

    # --- what happens --------------------------------------------------------------------------------------

    def open(self, now: float) -> None:
        """There is a new socket."""
        if self.sessions:
            self._forgive(now)
        else:
            self._heard_at = now
        self.sessions += 1
        self._opened_at = self._beat_at = self._ticked_at = now
        self._begin()

    def heard(self, frames: Sequence[bytes], now: float) -> Envelope | None:
        """Frames came. What is no matter of the session is returned, for the caller to act upon and confirm.

        Raises:
            ProtocolError: another run, or another release, answers at the endpoint.
        """
        self._heard_at = now
        try:
            envelope = decode(frames, self._caller.hears)
        except OtherProtocol as error:
            raise OtherProtocol(f"the allocator at {self._endpoint}: {error}") from error
        except ProtocolError as error:
            self._bad_frame(error, now)
            return None
        self._notice(envelope.sender)
        match envelope.message:
            case Received(ids=[]):
                self._disowned()
            case Received(ids=ids):
                self._outbox.received(ids)
            case Durable(ids=ids):
                self._outbox.durable(ids)
            case Welcome() as welcome:
                self._welcome(welcome, now)
            case _:
                return envelope
        return None

    def tick(self, now: float) -> bool:
        """Time has passed: queue what is due. False when this socket is to be thrown away for a new one.

        Raises:
            PeerLost: no word from the allocator for `lost_after_s`.
        """
        self._forgive(now)
        if self._is_dead(now):
            return False
        self._keep_alive(now)
        self._resend(now)
        return True

    def patience(self, now: float) -> float:
        """Seconds until `tick` has something to do, if nothing happens before."""
        due = self._beat_at + self._timing.beat_s
        if self.welcomed:
            due = min(due, self._outbox.next_due())
        return max(0.0, due - now)

    # --- within --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Hello comes first. What was queued is either in the outbox or not worth waiting for."""
        self.welcomed = False
        self.queue.clear()
        self._hello()

    def _hello(self) -> None:
        self.queue.append(self.encode(self._caller.hello()))

    def _notice(self, sender: str) -> None:
        """Another process of the allocator than before knows neither this caller nor what it has said."""
        if sender == self._allocator:
            return
        if self.welcomed:
            LOG.info("the allocator was restarted")
            self._begin()
        self._allocator = sender

    def _disowned(self) -> None:
        """This is said to strangers: the allocator has not, or no longer, let this caller in."""
        if self.welcomed:
            LOG.info("the allocator no longer knows this %s", self._caller.role)
            self._begin()

    def _welcome(self, welcome: Welcome, now: float) -> None:
        if self.run not in ("", welcome.run):
            role = self._caller.role
            raise ProtocolError(
                f"the allocator at {self._endpoint} now serves run {welcome.run!r}, this {role} belongs to "
                f"{self.run!r}; start a new {role} for the new run"
            )
        self.run = welcome.run
        self._timing = replace(
            self._timing, heartbeat_s=welcome.heartbeat_s, dead_after_s=welcome.dead_after_s
        )
        self._caller.on_welcome(welcome, not self.welcomed)
        if not self.welcomed:
            self.welcomed = True
            self._outbox.reset(now)
            self._resend(now)

    def _resend(self, now: float) -> None:
        if self.welcomed:
            self.queue.extend(self._outbox.due(now))

    def _forgive(self, now: float) -> None:
        """Ticks come once a beat at least. Where they did not, this process was stopped and heard nothing."""
        listening_at = max(self._ticked_at, self._heard_at)
        stopped_s = max(0.0, now - listening_at - 2 * self._timing.beat_s)
        self._heard_at += stopped_s
        self._opened_at += stopped_s
        self._ticked_at = now

    def _is_dead(self, now: float) -> bool:
        silence = now - self._heard_at
        if silence > self._timing.lost_after_s:
            raise PeerLost(
                f"no allocator has answered at {self._endpoint} for {self._timing.lost_after_s:g} s "
                "(cluster.connect_timeout_s); start one there, or correct cluster.allocator"
            )
        # Each socket has the whole time to find somebody, however long the silence was before it.
        dead = min(silence, now - self._opened_at) > self._timing.dead_after_s
        if dead:
            LOG.warning("the allocator is silent for %.1f s; connecting anew", silence)
        return dead

    def _keep_alive(self, now: float) -> None:
        if now < self._beat_at + self._timing.beat_s:
            return
        self._beat_at = now
        if self.queue:  # nothing gets through now: more would only pile up
            return
        if self.welcomed:
            # No Hello here, however long the silence: its answer would end that without anything sent again.
            self.queue.append(self.encode(self._caller.heartbeat()))
        else:
            self._hello()

    def _bad_frame(self, error: ProtocolError, now: float) -> None:
        self.bad_frames += 1
        held_back = self._repeats.allow("bad_frame", now)
        if held_back is not None:
            LOG.warning(
                "ignored a damaged message: %s", error, extra=fields("bad_frame", held_back=held_back)
            )
