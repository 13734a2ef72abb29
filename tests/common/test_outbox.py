"""The outbox: nothing is forgotten before it is durable; what was received goes again only now and then."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.outbox import Outbox


def frames(number: int) -> list[bytes]:
    return [b"TW", b"header", str(number).encode()]


def filled(count: int, now: float = 0.0) -> Outbox:
    outbox = Outbox(resend_s=2.0)
    for number in range(count):
        outbox.add(bytes([number]), frames(number), now)
    return outbox


def test_a_message_is_due_again_every_resend_interval_until_it_was_received() -> None:
    outbox = filled(1)
    assert outbox.due(1.9) == []
    assert outbox.due(2.0) == [frames(0)]
    assert outbox.due(3.9) == []
    assert outbox.due(4.0) == [frames(0)]
    outbox.received([b"\0"])
    assert outbox.due(15.9) == []
    assert len(outbox) == 1


def test_a_received_message_whose_durable_was_lost_goes_again_so_that_it_is_said_once_more() -> None:
    outbox = filled(1)
    outbox.received([b"\0"])
    outbox.received([b"\0"])
    assert outbox.due(11.9) == []
    assert outbox.due(12.0) == [frames(0)]
    assert outbox.due(14.0) == [frames(0)], "sent again, it is as if it had not been received"


def test_due_messages_come_in_the_order_they_were_added() -> None:
    outbox = filled(5)
    outbox.received([b"\2"])
    assert outbox.due(2.0) == [frames(number) for number in (0, 1, 3, 4)]


def test_a_reset_resends_everything_not_durable_received_or_not_in_order() -> None:
    outbox = filled(4)
    outbox.received([b"\0", b"\1"])
    outbox.durable([b"\1"])
    outbox.reset(1.0)
    assert outbox.due(1.0) == [frames(number) for number in (0, 2, 3)]


def test_durable_without_received_forgets_as_well() -> None:
    outbox = filled(1)
    outbox.durable([b"\0"])
    assert len(outbox) == 0
    assert outbox.due(10.0) == []


def test_unknown_ids_and_repeats_are_ignored() -> None:
    outbox = filled(1)
    outbox.received([b"?", b"\0", b"\0"])
    outbox.durable([b"?"])
    outbox.add(b"\0", frames(9), 0.0)
    outbox.reset(1.0)
    assert outbox.due(1.0) == [frames(0)]


def test_a_late_received_for_a_message_that_is_durable_does_not_bring_it_back() -> None:
    outbox = filled(1)
    outbox.durable([b"\0"])
    outbox.received([b"\0"])
    outbox.reset(1.0)
    assert outbox.due(1.0) == []


def test_the_next_due_time_is_known_without_sending_anything() -> None:
    outbox = Outbox(resend_s=2.0)
    assert outbox.next_due() == math.inf
    outbox.add(b"a", frames(0), 5.0)
    outbox.add(b"b", frames(1), 4.0)
    assert outbox.next_due() == 6.0
    outbox.received([b"a", b"b"])
    assert outbox.next_due() == 16.0


class OutboxAgainstAList(RuleBasedStateMachine):
    """The oracle is a list of [number, received since it was sent, due], searched literally."""

    @initialize()
    def start(self) -> None:
        self.outbox, self.model, self.now, self.count = Outbox(resend_s=2.0), [], 0.0, 0

    @rule()
    def add(self) -> None:
        self.outbox.add(str(self.count).encode(), frames(self.count), self.now)
        self.model.append([self.count, False, self.now + 2.0])
        self.count += 1

    @rule(number=st.integers(0, 12))
    def received(self, number: int) -> None:
        self.outbox.received([str(number).encode()])
        for entry in self.model:
            if entry[0] == number and not entry[1]:
                entry[1], entry[2] = True, entry[2] + 10.0

    @rule(numbers=st.lists(st.integers(0, 12), max_size=3))
    def durable(self, numbers: list[int]) -> None:
        self.outbox.durable([str(number).encode() for number in numbers])
        self.model = [entry for entry in self.model if entry[0] not in numbers]

    @rule()
    def reset(self) -> None:
        self.outbox.reset(self.now)
        for entry in self.model:
            entry[1], entry[2] = False, self.now

    @rule(passed=st.sampled_from([0.0, 0.5, 2.0, 7.0]))
    def wait(self, passed: float) -> None:
        self.now += passed
        expected = [entry for entry in self.model if entry[2] <= self.now]
        for entry in expected:
            entry[1], entry[2] = False, self.now + 2.0
        assert self.outbox.due(self.now) == [frames(entry[0]) for entry in expected]

    @invariant()
    def holds_exactly_what_is_not_durable(self) -> None:
        assert len(self.outbox) == len(self.model)


TestOutboxAgainstAList = OutboxAgainstAList.TestCase
TestOutboxAgainstAList.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
