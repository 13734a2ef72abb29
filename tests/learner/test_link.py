"""The line to the allocator over real sockets: order, resends, silence, loss, goodbye."""

import time
from queue import SimpleQueue

import pytest

from common.config import ClusterConfig, SecurityConfig
from common.errors import PeerLost
from common.messages import PROTOCOL_VERSION, Bye, Capabilities, Credit, Heartbeat, Hello
from common.nouns import Version
from learner.link import AllocatorLink, Delivered, Dismissed, Welcomed
from tests.learner.fake_allocator import RUN, FakeAllocator
from tests.learner.helpers import V0, forked_tree


def hello() -> Hello:
    return Hello(
        role="learner", peer="learner", incarnation="1", protocol=PROTOCOL_VERSION,
        capabilities=Capabilities(), agreed={}, version=V0,
    )  # fmt: skip


def make(tree_id: int, version: Version):
    return forked_tree(tree_id)


class Open:
    """A link with its events, closed at the end."""

    def __init__(self, endpoint: str, **cluster) -> None:
        self.events: SimpleQueue = SimpleQueue()
        settings = dict(heartbeat_s=0.1, dead_after_s=0.5, connect_timeout_s=10.0)
        self.link = AllocatorLink(
            ClusterConfig(allocator=endpoint, **{**settings, **cluster}),
            SecurityConfig(), "learner/1", hello, self.events.put, RUN,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.link.close()

    def next(self, kind: type, timeout_s: float = 10.0):
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(0.01, deadline - time.monotonic()))
            if isinstance(event, kind):
                return event


def test_trees_come_only_within_the_credit_given_and_are_acknowledged():
    with FakeAllocator(make, ahead=100) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        assert not allocator.sent
        end.link.send(Credit(3))
        delivered = [end.next(Delivered) for _ in range(3)]
        assert [event.tree.id for event in delivered] == [0, 1, 2]
        end.link.durable([event.id for event in delivered])
        allocator.wait(lambda: allocator.durable >= {event.id for event in delivered})
        assert allocator.sent == 3


def test_what_was_sent_before_the_welcome_arrives_in_order():
    with FakeAllocator(make, ahead=0) as allocator:
        allocator.deaf.set()
        with Open(allocator.endpoint) as end:
            for total in (1, 2, 3):
                end.link.send(Credit(total))
            allocator.deaf.clear()
            allocator.wait(lambda: len(allocator.of(Credit)) == 3)
            assert [message.total for message in allocator.of(Credit)] == [1, 2, 3]
            assert end.link.drain(5)


def test_heartbeats_carry_the_progress_of_the_training_loop():
    with FakeAllocator(make, ahead=0) as allocator, Open(allocator.endpoint) as end:
        end.link.progress, end.link.running = 7, 2
        allocator.wait(lambda: Heartbeat(progress=7, running=2) in allocator.said)


def test_after_a_silence_the_socket_is_replaced_and_nothing_is_lost():
    timing = dict(heartbeat_s=0.1, dead_after_s=0.5)
    with FakeAllocator(make, ahead=0, **timing) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        allocator.deaf.set()
        end.link.send(Credit(5))
        deadline = time.monotonic() + 10
        while end.link.sessions < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert end.link.sessions >= 2
        end.link.send(Credit(6))
        allocator.deaf.clear()
        allocator.wait(lambda: len(allocator.of(Credit)) == 2)
        assert [message.total for message in allocator.of(Credit)] == [5, 6]
        assert end.link.drain(5)
        end.next(Welcomed)


def test_what_was_received_but_not_written_down_goes_again_after_a_reconnect():
    timing = dict(heartbeat_s=0.1, dead_after_s=0.5)
    with FakeAllocator(make, ahead=0, **timing) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        allocator.forgetful.set()
        end.link.send(Credit(5))
        allocator.wait(lambda: allocator.arrivals["Credit"] == 1)
        allocator.deaf.set()
        allocator.wait(lambda: end.link.sessions >= 2)
        allocator.forgetful.clear()
        allocator.deaf.clear()
        assert end.link.drain(5)
        assert allocator.arrivals["Credit"] == 2


def test_another_process_of_the_allocator_is_known_by_its_name_and_told_everything_at_once():
    """No silence is waited for, and no new socket made."""
    timing = dict(heartbeat_s=0.1, dead_after_s=60.0)
    with FakeAllocator(make, ahead=0, **timing) as allocator, Open(allocator.endpoint, **timing) as end:
        end.next(Welcomed)
        allocator.forgetful.set()
        end.link.send(Credit(5))
        allocator.wait(lambda: allocator.arrivals["Credit"] == 1)
        allocator.forgetful.clear()
        allocator.name = "allocator/2"  # its next word, about a heartbeat, bears that
        end.next(Welcomed)
        assert end.link.drain(5)
        assert allocator.arrivals["Credit"] == 2 and end.link.sessions == 1
        time.sleep(0.5)
        assert len(allocator.hellos) == 2


def test_an_idle_line_is_kept_open_without_reconnecting():
    timing = dict(heartbeat_s=0.1, dead_after_s=0.5)
    with FakeAllocator(make, ahead=0, **timing) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        time.sleep(1.5)
        assert end.link.sessions == 1


def test_nobody_at_the_endpoint_is_peer_lost_with_endpoint_setting_and_remedy():
    with Open("tcp://127.0.0.1:9", connect_timeout_s=1.0) as end:
        error = end.next(PeerLost)
        assert error.exit_code == 6
        assert str(error) == (
            "no allocator has answered at tcp://127.0.0.1:9 for 1 s (cluster.connect_timeout_s); "
            "start one there, or correct cluster.allocator"
        )


@pytest.mark.parametrize("code", [0, 2])
def test_a_goodbye_is_an_event_with_its_code_and_reason(code):
    with FakeAllocator(make, ahead=0) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        allocator.goodbye = Bye(code, "settings differ")
        error = end.next(Dismissed)
        assert error.exit_code == code and "settings differ" in str(error)


def test_drain_says_no_when_the_allocator_does_not_confirm():
    with FakeAllocator(make, ahead=0) as allocator, Open(allocator.endpoint) as end:
        end.next(Welcomed)
        allocator.deaf.set()
        end.link.send(Credit(1))
        assert not end.link.drain(0.3)
