"""Every socket counts the bytes that travel."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
import zmq.asyncio

from common import traffic as module
from common.config import SecurityConfig
from common.sockets import SocketFactory, bound_endpoint
from common.traffic import Traffic

ANY_PORT = "tcp://127.0.0.1:0"
FRAMES = [b"head", b"x" * 1000, b""]
SIZE = 1004


@pytest.fixture(name="traffic", autouse=True)
def fresh_traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Other tests of this process send too."""
    fresh = Traffic()
    monkeypatch.setattr(module, "TRAFFIC", fresh)
    return fresh


@pytest.fixture(name="context")
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_request_and_its_answer_are_counted_at_both_ends_without_the_routing_id(
    context: zmq.Context[zmq.Socket[bytes]], traffic: Traffic
) -> None:
    factory = SocketFactory(SecurityConfig(), context)
    router = factory.router(ANY_PORT)
    endpoint = bound_endpoint(router)
    dealer = factory.dealer(endpoint)
    dealer.send_multipart(FRAMES)
    route, *frames = router.recv_multipart()
    assert frames == FRAMES
    assert traffic.by_endpoint() == {endpoint: [SIZE, SIZE]}
    router.send_multipart([route, b"12345"])
    assert dealer.recv_multipart() == [b"12345"]
    assert traffic.by_endpoint() == {endpoint: [SIZE + 5, SIZE + 5]}
    assert traffic.totals() == {"sent_bytes": SIZE + 5, "received_bytes": SIZE + 5}


def test_a_message_that_is_not_accepted_is_not_counted(
    context: zmq.Context[zmq.Socket[bytes]], traffic: Traffic
) -> None:
    router = SocketFactory(SecurityConfig(), context).router(ANY_PORT)
    with pytest.raises(zmq.ZMQError):
        router.send_multipart([b"nobody", *FRAMES], zmq.NOBLOCK)
    with pytest.raises(zmq.Again):
        router.recv_multipart(zmq.NOBLOCK)
    assert traffic.totals() == {"sent_bytes": 0, "received_bytes": 0}


def test_sockets_of_asyncio_count_what_came_at_once_what_came_later_and_nothing_that_was_cancelled(
    traffic: Traffic,
) -> None:
    async def scenario() -> str:
        context = zmq.asyncio.Context()
        factory = SocketFactory(SecurityConfig(), context)
        router = factory.router(ANY_PORT)
        endpoint = bound_endpoint(router)
        dealer = factory.dealer(endpoint)
        later = router.recv_multipart()
        await dealer.send_multipart(FRAMES)
        route, *_ = await later
        await router.send_multipart([route, b"12345"])
        while not await dealer.poll(1000):
            pass
        assert await dealer.recv_multipart() == [b"12345"]
        never = asyncio.ensure_future(dealer.recv_multipart())
        await asyncio.sleep(0)
        never.cancel()
        await asyncio.sleep(0)
        context.destroy(linger=0)
        return endpoint

    endpoint = asyncio.run(scenario())
    assert traffic.by_endpoint() == {endpoint: [SIZE + 5, SIZE + 5]}


def test_what_a_publisher_sends_is_counted_once_and_by_each_subscriber(
    context: zmq.Context[zmq.Socket[bytes]], traffic: Traffic
) -> None:
    factory = SocketFactory(SecurityConfig(), context)
    pub = factory.pub(ANY_PORT)
    subs = [factory.sub(bound_endpoint(pub)) for _ in range(2)]
    sent = 0
    while not all(sub.poll(0) for sub in subs):  # a subscription takes a moment to arrive
        pub.send_multipart([b"hint"])
        sent += 4
        subs[-1].poll(20)
    pub.close(0)
    received = 0
    for sub in subs:
        while sub.poll(100):
            received += len(sub.recv_multipart()[0])
    ((there, here),) = traffic.by_endpoint().values()
    assert (there, here) == (sent, received)
