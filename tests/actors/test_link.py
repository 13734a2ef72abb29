import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.link import Handlers, Link, Timing
from common.codec import decode, encode
from common.errors import PeerLost, ProtocolError
from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Declined,
    Heartbeat,
    Hello,
    InspectFailed,
    Revoke,
    ToAllocator,
    Welcome,
)
from common.nouns import LeaseId
from tests.actors.servers import FakeAllocator, factory, until

QUICK = Timing(heartbeat_s=0.05, dead_after_s=0.3, lost_after_s=5.0)


def welcome(run: str = "run", timing: Timing = QUICK) -> Welcome:
    return Welcome(run, "", "", "", "", None, timing.heartbeat_s, timing.dead_after_s, 0, False)


class Caller:
    """Somebody at the actor's end of the line."""

    def __init__(self, endpoint: str, timing: Timing = QUICK) -> None:
        self.welcomes: list[Welcome] = []
        self.messages: list[Any] = []
        self.events: list[str] = []
        handlers = Handlers(
            hello=lambda: Hello("actor", "a", "1", PROTOCOL_VERSION, Capabilities(), {}),
            heartbeat=lambda: Heartbeat(7, 3),
            on_welcome=self.welcomes.append,
            on_message=self.messages.append,
            before_write=lambda: self.events.append("write"),
        )
        self.link = Link(factory(), endpoint, "a/1", handlers, timing)

    async def __aenter__(self) -> "Caller":
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def numbers(allocator: FakeAllocator) -> list[int]:
    """Trees of the `InspectFailed` that came, repeats left out, in order of their first coming."""
    return list(dict.fromkeys(message.tree for message in allocator.of(InspectFailed)))


def speak(link: Link, first: int, last: int) -> None:
    for number in range(first, last):
        link.send(InspectFailed(number, "x"))


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_hello_goes_first_and_everything_else_waits_for_the_welcome() -> None:
    async def scenario() -> None:
        allocator = FakeAllocator(welcome())
        allocator.welcome = None
        async with allocator, Caller(allocator.endpoint) as caller:
            speak(caller.link, 0, 3)
            await until(lambda: len(allocator.hellos) >= 2, what="a repeated hello")
            assert allocator.messages == [] and allocator.heartbeats == []
            allocator.welcome = welcome()
            await until(lambda: numbers(allocator) == [0, 1, 2])
            await until(lambda: caller.link.undelivered == 0)
            assert await caller.link.drain(1.0)

    run(scenario)


def test_heartbeats_carry_progress_and_flow_while_nothing_else_does() -> None:
    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint):
            await until(lambda: len(allocator.heartbeats) >= 3)
            assert allocator.heartbeats[0] == Heartbeat(7, 3)
            assert len(allocator.hellos) == 1, "an answered heartbeat needs no new hello"

    run(scenario)


def test_what_was_received_but_not_made_durable_is_kept_and_sent_again_to_a_new_allocator() -> None:
    async def scenario() -> None:
        first, second = FakeAllocator(welcome()), FakeAllocator(welcome())
        first.durable = False
        await first.open()
        async with Caller(first.endpoint) as caller:
            speak(caller.link, 0, 5)
            await until(lambda: numbers(first) == [0, 1, 2, 3, 4])
            await first.close()
            speak(caller.link, 5, 8)  # nobody is there now
            second.endpoint = first.endpoint
            async with second:
                await until(lambda: numbers(second) == list(range(8)), what="everything, in order")
                assert caller.link.sessions >= 2
                await until(lambda: caller.link.undelivered == 0)

    run(scenario)


def test_another_process_of_the_allocator_is_known_by_its_name_and_told_everything_at_once() -> None:
    """No silence is waited for: within one session, what was received but not written down goes again."""

    async def scenario() -> None:
        patient = Timing(heartbeat_s=0.05, dead_after_s=60.0, lost_after_s=60.0)
        allocator = FakeAllocator(welcome(timing=patient))
        allocator.durable = False
        async with allocator, Caller(allocator.endpoint, patient) as caller:
            speak(caller.link, 0, 5)
            await until(lambda: numbers(allocator) == [0, 1, 2, 3, 4])
            allocator.durable = True
            await allocator.restart("fake/2")
            speak(caller.link, 5, 7)
            await until(lambda: numbers(allocator) == list(range(7)), what="everything, in order")
            await until(lambda: caller.link.undelivered == 0)
            assert len(allocator.hellos) == 2 and caller.link.sessions == 1
            await until(lambda: len(allocator.heartbeats) > 5, what="the same name again")
            assert len(allocator.hellos) == 2

    run(scenario)


def test_silence_makes_a_fresh_socket_even_if_the_connection_looks_alive() -> None:
    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: len(caller.welcomes) == 1)
            allocator.deaf = True
            speak(caller.link, 0, 2)
            await until(lambda: caller.link.sessions >= 2)
            allocator.deaf = False
            await until(lambda: numbers(allocator) == [0, 1])

    run(scenario)


def test_a_message_that_was_not_even_received_is_sent_again_on_the_same_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("common.session.RESEND_S", 0.1)

    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: len(caller.welcomes) == 1)
            allocator.receive = allocator.durable = False
            speak(caller.link, 0, 2)
            await until(lambda: [m.tree for m in allocator.of(InspectFailed)][:4] == [0, 1, 0, 1])
            assert caller.link.sessions == 1

    run(scenario)


def test_what_arrives_is_made_durable_after_the_journal_was_written_and_a_repeat_is_acknowledged_again() -> (
    None
):
    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: len(caller.welcomes) == 1)
            message = Revoke(LeaseId(1, 2, 3), "too old")
            msg_id = await allocator.send(message)
            await until(lambda: msg_id in allocator.acked)
            assert caller.messages == [message] and "write" in caller.events
            allocator.acked.clear()
            await allocator.send(message, msg_id)
            await until(lambda: msg_id in allocator.acked)

    run(scenario)


class Stuck:
    """A factory and its one socket, which hears what is put into `heard` and sends when it is let."""

    def __init__(self, events: list[str]) -> None:
        self.heard: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.sends = asyncio.Semaphore(0)
        self._events = events

    def dealer(self, _endpoint: str) -> "Stuck":
        return self

    async def recv_multipart(self) -> list[bytes]:
        return await self.heard.get()

    async def send_multipart(self, frames: list[bytes]) -> None:
        await self.sends.acquire()
        self._events.append(type(decode(frames, ToAllocator).message).__name__)

    def close(self, linger: int | None) -> None:
        self._events.append(f"closed with {linger}")


def test_what_is_said_while_the_line_is_stuck_waits_until_the_journal_is_written_again() -> None:
    async def scenario() -> None:
        caller = Caller("tcp://127.0.0.1:1", Timing(60.0, 600.0, 600.0))
        socket = Stuck(caller.events)
        caller.link._factory = socket  # type: ignore[assignment]
        async with caller:
            await until(lambda: caller.events == ["write"], what="a hello that does not get through")
            answer = encode(welcome(timing=Timing(60.0, 600.0, 600.0)), run="run", sender="fake/1")
            await socket.heard.put(answer)
            await until(lambda: len(caller.welcomes) == 1)
            speak(caller.link, 0, 1)
            assert not await caller.link.drain(0.0)
            socket.sends.release()
            socket.sends.release()
            await until(lambda: len(caller.events) == 4)
            assert caller.events == ["write", "Hello", "write", "InspectFailed"]
            speak(caller.link, 1, 2)
            await until(lambda: len(caller.events) == 5)
        assert caller.events[4:] == ["write", "closed with 0"], "what was not sent does not hold up the end"

    run(scenario)


def test_heartbeats_follow_the_allocators_word_at_once_and_not_after_a_beat_of_ones_own() -> None:
    async def scenario() -> None:
        own = Timing(heartbeat_s=60.0, dead_after_s=240.0, lost_after_s=240.0)
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint, own):
            await until(lambda: len(allocator.heartbeats) > 1, what="heartbeats of every 50 ms")

    run(scenario)


def test_damaged_messages_are_counted_and_change_nothing() -> None:
    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: len(caller.welcomes) == 1)
            good = encode(Revoke(LeaseId(1, 2, 3), "x"), run="run", sender="fake/1")
            await allocator.send_raw([good[0], good[1], good[2][:-1]])
            await allocator.send_raw([b"noise"])
            await allocator.send_raw(encode(Declined(LeaseId(1, 2, 3), "x"), run="run", sender="fake/1"))
            await until(lambda: caller.link.bad_frames == 3)
            assert caller.messages == [] and not caller.task.done()

    run(scenario)


def test_a_goodbye_before_any_welcome_arrives() -> None:
    async def scenario() -> None:
        allocator = FakeAllocator(welcome())
        allocator.welcome = None
        async with allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: bool(allocator.hellos))
            await allocator.send(Bye(2, "env.size differs"))
            await until(lambda: caller.messages == [Bye(2, "env.size differs")])

    run(scenario)


def test_no_allocator_for_too_long_is_one_sentence_with_the_remedy() -> None:
    async def scenario() -> None:
        caller = Caller("tcp://127.0.0.1:1", Timing(0.05, 0.2, 0.4))
        with pytest.raises(PeerLost, match=r"no allocator has answered at tcp://127\.0\.0\.1:1 for 0\.4 s"):
            await caller.link.run()

    run(scenario)


def test_an_allocator_that_goes_for_good_is_noticed_too() -> None:
    async def scenario() -> None:
        timing = Timing(0.05, 0.2, 0.6)
        async with FakeAllocator(welcome(timing=timing)) as allocator:
            caller = Caller(allocator.endpoint, timing)
            async with caller:
                await until(lambda: len(caller.welcomes) == 1)
                allocator.deaf = True
                with pytest.raises(PeerLost):
                    await asyncio.wait_for(asyncio.shield(caller.task), 5)

    run(scenario)


def test_another_run_at_the_same_endpoint_is_refused() -> None:
    async def scenario() -> None:
        async with FakeAllocator(welcome()) as allocator, Caller(allocator.endpoint) as caller:
            await until(lambda: len(caller.welcomes) == 1)
            await allocator.send(welcome("another"))
            with pytest.raises(ProtocolError, match="now serves run 'another'"):
                await asyncio.wait_for(asyncio.shield(caller.task), 5)

    run(scenario)
