"""Metrics: the role that logs them never waits and never fails, whatever the tracker does."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from common.codec import decode
from common.config import SecurityConfig
from common.messages import Metrics, ToTracker
from common.metrics import MetricsClient
from common.sockets import HIGH_WATER_MARK, SocketFactory, bound_endpoint

Factory = SocketFactory[zmq.Socket[bytes]]


@pytest.fixture(name="sockets")
def factory() -> Iterator[Factory]:
    context = zmq.Context()
    yield SocketFactory(SecurityConfig(), context)
    context.destroy(linger=0)


@pytest.fixture(name="pull")
def tracker_socket(sockets: Factory) -> zmq.Socket[bytes]:
    return sockets.pull("tcp://127.0.0.1:0")


def client_of(endpoint: str) -> MetricsClient:
    return MetricsClient(endpoint, "learner", "learner")


def receive(pull: zmq.Socket[bytes]) -> Metrics:
    assert pull.poll(5000), "nothing arrived"
    message = decode(pull.recv_multipart(), ToTracker).message
    assert isinstance(message, Metrics)
    return message


def free_endpoint() -> str:
    """An endpoint on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"


def test_values_arrive_with_role_peer_and_step(pull: zmq.Socket[bytes]) -> None:
    with client_of(bound_endpoint(pull)) as client:
        client.log(3, loss=0.5, steps=7, **{"reward/mean": True})
        assert receive(pull) == Metrics(
            role="learner", peer="learner", step=3, values={"loss": 0.5, "steps": 7.0, "reward/mean": 1.0}
        )
    assert client.dropped == 0


def test_what_was_logged_before_the_tracker_listened_arrives_in_order(sockets: Factory) -> None:
    endpoint = free_endpoint()
    with client_of(endpoint) as client:
        for step in range(20):
            client.log(step, loss=1.0)
        pull = sockets.pull(endpoint)
        assert [receive(pull).step for _ in range(20)] == list(range(20))


def test_what_was_logged_last_is_delivered_although_the_role_closes_at_once(pull: zmq.Socket[bytes]) -> None:
    with client_of(bound_endpoint(pull)) as client:
        for step in range(20):
            client.log(step, loss=1.0)
    assert [receive(pull).step for _ in range(20)] == list(range(20))


def test_a_tracker_that_is_not_there_costs_no_time_and_bounded_memory() -> None:
    client = client_of(free_endpoint())
    began = time.monotonic()
    for step in range(HIGH_WATER_MARK + 50):
        client.log(step, loss=1.0)
    assert time.monotonic() - began < 3
    assert client.dropped == 50
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < 3


def test_a_tracker_that_reads_nothing_costs_no_time(pull: zmq.Socket[bytes]) -> None:
    with client_of(bound_endpoint(pull)) as client:
        slowest = 0.0
        for step in range(5000):
            began = time.monotonic()
            client.log(step, loss=1.0)
            slowest = max(slowest, time.monotonic() - began)
        pull.close(0)
    assert slowest < 1.0


def test_values_that_are_no_numbers_are_counted_and_the_others_sent(pull: zmq.Socket[bytes]) -> None:
    values = {
        "good": 1.0,
        "text": "high",
        "none": None,
        "list": [1],
        "huge": 10**400,
        "": 2.0,
        "n" * 300: 3.0,
    }
    with client_of(bound_endpoint(pull)) as client:
        client.log(-5, **values)  # type: ignore[arg-type]
        message = receive(pull)
    assert message.values == {"good": 1.0, "unnamed": 2.0, "n" * 128: 3.0}
    assert message.step == 0
    assert client.dropped == 4


def test_numbers_that_are_not_finite_go_to_the_tracker_which_counts_them(pull: zmq.Socket[bytes]) -> None:
    with client_of(bound_endpoint(pull)) as client:
        client.log(0, loss=math.nan, bound=math.inf)
        values = receive(pull).values
    assert math.isnan(values["loss"])
    assert values["bound"] == math.inf


def test_more_values_than_a_message_holds_are_split(pull: zmq.Socket[bytes]) -> None:
    with client_of(bound_endpoint(pull)) as client:
        client.log(1, **{f"m{number}": float(number) for number in range(5000)})
        assert len(receive(pull).values) + len(receive(pull).values) == 5000


@pytest.mark.parametrize("endpoint", ["", "tcp://127.0.0.1:port", "nonsense"])
def test_no_endpoint_or_a_wrong_one_makes_a_client_that_forgets(endpoint: str) -> None:
    client = client_of(endpoint)
    client.log(1, loss=1.0)
    client.close()
    client.log(2, loss=1.0)
    client.close()
    assert client.dropped == 2
