"""The session through all short histories, and through long ones of two sides and a bad line."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.codec import decode
from common.messages import AllocatorToActor, Durable, Hello, InspectFailed, Received, ToAllocator
from common.session import RESEND_S
from tests.common.session_sides import (
    PATIENT,
    TIMING,
    Listening,
    numbered,
    opened,
    read,
    welcome,
    word,
)

# --- all short lives, against a count of the time listened ---------------------------------------------------


@pytest.mark.parametrize("answered", list(itertools.product([False, True], repeat=2)))
def test_every_short_life_ends_when_a_literal_count_of_the_time_listened_says_so(
    answered: tuple[bool, bool],
) -> None:
    """All lives of five intervals, with words after the first and third: they may be pauses."""
    for gaps in itertools.product([0.5, 1.0, 2.0, 3.0, 9.0], repeat=5):
        side, oracle, now = opened(), Listening(0.0), 0.0
        for place, gap in enumerate(gaps):
            now += gap
            if place in (1, 3) and answered[place // 2]:
                side.session.heard(word(Durable([])), now)
                oracle.hear(now)
            if not oracle.agrees(side.session, now):
                break


# --- all short histories, against a list ---------------------------------------------------------------------

WORDS: dict[str, list[bytes]] = {
    "welcome 1": word(welcome(timing=PATIENT)),
    "welcome 2": word(welcome(timing=PATIENT), "allocator/2"),
    "word 1": word(Durable([])),
    "word 2": word(Durable([]), "allocator/2"),
    "stranger 1": word(Received([])),
    "stranger 2": word(Received([]), "allocator/2"),
    "received 1": word(Received([numbered(0)])),
    "durable 1": word(Durable([numbered(0)])),
}
EVENTS = ("send", "open", "beat", *WORDS)


class Literal:
    """What the queue must hold, said as plainly as possible. `kept` is [number, due, received]."""

    def __init__(self) -> None:
        self.queue: list[Any] = ["Hello"]
        self.kept: list[list[Any]] = []
        self.welcomed, self.name, self.count = False, "", 0

    def happen(self, event: str, now: float) -> None:
        kind, _, name = event.partition(" ")
        if kind == "send":
            self.kept.append([self.count, now + RESEND_S, False])
            self.queue += [self.count] if self.welcomed else []
            self.count += 1
        elif kind == "open":
            self.welcomed, self.queue = False, ["Hello"]
        elif kind == "beat":
            if not self.queue:
                self.queue.append("Heartbeat" if self.welcomed else "Hello")
            if self.welcomed:
                self.again([entry for entry in self.kept if entry[1] <= now], now)
        else:
            self.hear(kind, name, now)

    def hear(self, kind: str, name: str, now: float) -> None:
        if self.welcomed and (name != self.name or kind == "stranger"):
            self.welcomed, self.queue = False, ["Hello"]
        self.name = name
        if kind == "welcome" and not self.welcomed:
            self.welcomed = True
            self.again(self.kept, now)
        elif kind == "durable":
            self.kept = [entry for entry in self.kept if entry[0] != 0]
        elif kind == "received":
            for entry in self.kept:
                if entry[0] == 0 and not entry[2]:
                    entry[1:] = [entry[1] + 5 * RESEND_S, True]

    def again(self, entries: list[list[Any]], now: float) -> None:
        for entry in entries:
            self.queue.append(entry[0])
            entry[1:] = [now + RESEND_S, False]


@pytest.mark.parametrize("first", EVENTS)
def test_after_every_short_history_the_queue_is_what_a_literal_reading_of_the_rules_says(first: str) -> None:
    """The socket takes what is queued after every second event."""
    for others in itertools.product(EVENTS, repeat=3):
        side, literal, now = opened(PATIENT), Literal(), 0.0
        for place, event in enumerate((first, *others)):
            if event == "send":
                side.send(now)
            elif event == "open":
                side.session.open(now)
            elif event == "beat":
                now += 1.0
                assert side.session.tick(now)
            else:
                side.session.heard(WORDS[event], now)
            literal.happen(event, now)
            if place % 2:
                assert side.written() == literal.queue, (first, *others)
                literal.queue = []
        assert side.session.welcomed == literal.welcomed


# --- two sides and a bad line --------------------------------------------------------------------------------


class Allocator:
    """The other side, as far as it matters: memory dies with the process, the disk does not."""

    def __init__(self) -> None:
        self.disk: list[int] = []
        self.process = 0
        self.restart()

    def restart(self) -> None:
        self.process += 1
        self.known, self.memory = False, [*self.disk]

    @property
    def name(self) -> str:
        return f"allocator/{self.process}"

    def take(self, frames: list[bytes]) -> list[list[bytes]]:
        """Answers to a message. Strangers are told this process's name, and not heard."""
        envelope = decode(frames, ToAllocator)
        if isinstance(envelope.message, Hello):
            self.known = True
            return [word(welcome(), self.name)]
        if not self.known:
            return [word(Received([]), self.name)]
        if isinstance(envelope.message, InspectFailed) and envelope.message.tree not in self.memory:
            self.memory.append(envelope.message.tree)
        return [word(Received([envelope.id]), self.name)]

    def sync(self) -> list[list[bytes]]:
        """All that is in memory is written down, and said so if there is somebody to say it to."""
        self.disk = [*self.memory]
        return [word(Durable([numbered(number) for number in self.disk]), self.name)] if self.known else []


class TwoSidesAndABadLine(RuleBasedStateMachine):
    """Frames keep their order, and may be lost one by one or all at once; both ends may pause or be gone."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.allocator = Allocator()
        self.begin()

    def begin(self) -> None:
        """A caller's process starts; an earlier one of it has given up."""
        self.side, self.listening = opened(now=self.now), Listening(self.now)
        self.unconfirmed: list[int] = []
        """Sent, and not heard to be durable, in the order of sending."""
        self.allocator.disk, self.allocator.memory, self.allocator.known = [], [], False
        self.cut()

    @rule()
    def cut(self) -> None:
        """What is under way is lost."""
        self.up: deque[list[bytes]] = deque()
        self.down: deque[list[bytes]] = deque()

    @rule()
    def send(self) -> None:
        self.unconfirmed.append(self.side.count)
        self.side.send(self.now)

    @rule(count=st.integers(1, 8))
    def write(self, count: int) -> None:
        queue = self.side.session.queue
        for _ in range(min(count, len(queue))):
            frames = queue.popleft()
            assert self.side.session.welcomed or read(frames) == "Hello", "before any welcome"
            self.up.append(frames)

    @rule(synced=st.booleans())
    def all_goes_well_for_a_moment(self, synced: bool) -> None:
        self.write(10**6)
        self.arrive_there(10**6)
        if synced:
            self.sync()
        self.arrive_here(10**6)

    @precondition(lambda self: self.up)
    @rule(count=st.integers(1, 8))
    def arrive_there(self, count: int) -> None:
        for _ in range(min(count, len(self.up))):
            self.down.extend(self.allocator.take(self.up.popleft()))

    @precondition(lambda self: self.down)
    @rule(count=st.integers(1, 8))
    def arrive_here(self, count: int) -> None:
        for _ in range(min(count, len(self.down))):
            self.hear(self.down.popleft())

    @precondition(lambda self: self.down)
    @rule(seconds=st.sampled_from([3.0, 60.0]))
    def be_stopped_and_hear_before_anything_else(self, seconds: float) -> None:
        self.now += seconds
        self.hear(self.down.popleft())

    @rule()
    def hear_noise(self) -> None:
        self.hear([b"noise"])

    def hear(self, frames: list[bytes]) -> None:
        begun = sum(self.side.welcomes)
        assert self.side.session.heard(frames, self.now) is None
        self.listening.hear(self.now)
        if frames != [b"noise"]:
            message = decode(frames, AllocatorToActor).message
            if isinstance(message, Durable):
                said = {int.from_bytes(msg_id, "big") for msg_id in message.ids}
                self.unconfirmed = [number for number in self.unconfirmed if number not in said]
        if sum(self.side.welcomes) > begun:
            queued = [read(frames) for frames in self.side.session.queue]
            assert [what for what in queued if what != "Hello"] == self.unconfirmed, "all of it, in order"

    @precondition(lambda self: self.up)
    @rule()
    def lose_there(self) -> None:
        self.up.popleft()

    @precondition(lambda self: self.down)
    @rule()
    def lose_here(self) -> None:
        self.down.popleft()

    @rule()
    def sync(self) -> None:
        self.down.extend(self.allocator.sync())

    @rule()
    def restart(self) -> None:
        """What had arrived here before is heard yet: the line is found again by the socket itself."""
        self.allocator.restart()
        self.up.clear()

    @rule()
    def forget(self) -> None:
        """The allocator's process goes on, but takes the caller for gone for good."""
        self.allocator.known = False

    @rule(seconds=st.sampled_from([0.25, 0.5, 1.0, 2.0]), times=st.integers(1, 3))
    def wait(self, seconds: float, times: int) -> None:
        for _ in range(times):
            self.pass_time(seconds)

    @rule(seconds=st.sampled_from([5.0, 11.0, 3600.0]))
    def be_stopped(self, seconds: float) -> None:
        sessions = self.side.session.sessions
        if self.listening.silence <= TIMING.dead_after_s - 2 * TIMING.beat_s:
            self.pass_time(seconds)
            assert self.side.session.sessions == sessions, "a pause of this process is not silence"

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        sessions = self.side.session.sessions
        if not self.listening.agrees(self.side.session, self.now):
            self.begin()
        elif self.side.session.sessions > sessions:
            self.cut()

    @invariant()
    def nothing_is_lost(self) -> None:
        confirmed = set(range(self.side.count)) - set(self.unconfirmed)
        assert confirmed <= set(self.allocator.disk)
        assert self.side.session.undelivered == len(self.unconfirmed)

    def teardown(self) -> None:
        """The line is good from now on: all that was sent reaches the disk."""
        if not hasattr(self, "side"):
            return
        self.hear_noise()
        side = self.side
        for _ in range(40):
            self.all_goes_well_for_a_moment(synced=True)
            self.pass_time(1.0)
        assert self.side is side, "nobody gives up on a good line"
        assert self.unconfirmed == [] and self.side.session.undelivered == 0
        assert sorted(self.allocator.disk) == list(range(self.side.count))


TestTwoSidesAndABadLine = TwoSidesAndABadLine.TestCase
TestTwoSidesAndABadLine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
