"""Sockets: binds that expose nothing, errors that name the remedy, and the behaviour the roles rely on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from common.config import SecurityConfig
from common.errors import ConfigError, SecurityError
from common.sockets import SocketFactory, bound_endpoint, is_loopback

ANY_PORT = "tcp://127.0.0.1:0"
Factory = SocketFactory[zmq.Socket[bytes]]


@pytest.fixture(name="context")
def zmq_context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(name="sockets")
def factory(context: zmq.Context[zmq.Socket[bytes]]) -> Factory:
    return SocketFactory(SecurityConfig(), context)


def receive(receiver: zmq.Socket[bytes], timeout_s: float = 5.0) -> list[bytes]:
    assert receiver.poll(int(timeout_s * 1000)), "nothing arrived"
    return receiver.recv_multipart()


# --------------------------------------------------------------------------------------------- binds


def test_the_port_that_was_chosen_for_port_0_is_known(sockets: Factory) -> None:
    server = sockets.router(ANY_PORT)
    endpoint = bound_endpoint(server)
    assert endpoint.startswith("tcp://127.0.0.1:")
    assert int(endpoint.rpartition(":")[2]) > 0


def test_a_port_in_use_is_one_sentence_with_endpoint_holder_and_remedy(sockets: Factory) -> None:
    holder = sockets.router(ANY_PORT)  # a socket that nobody holds is closed
    endpoint = bound_endpoint(holder)
    with pytest.raises(ConfigError) as caught:
        sockets.pull(endpoint)
    assert caught.value.exit_code == 2
    for part in (f"cannot listen on {endpoint}", "in use", f"process {os.getpid()}", "choose another port"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:0",
        "tcp://*:0",
        "tcp://10.0.0.5:5555",
        "tcp://[::]:0",
        "tcp://example.org:5555",
        "tcp://lo:0",
    ],
)
def test_a_bind_that_others_could_reach_is_refused_without_keys(sockets: Factory, endpoint: str) -> None:
    for bind in (sockets.router, sockets.pub, sockets.pull):
        with pytest.raises(SecurityError, match="without keys") as caught:
            bind(endpoint)
        assert caught.value.exit_code == 3
        assert "security.allow_insecure_bind=true" in str(caught.value)


def test_an_insecure_bind_that_was_asked_for_is_made_and_announced(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    sockets = SocketFactory(SecurityConfig(allow_insecure_bind=True), context)
    with caplog.at_level(logging.WARNING, logger="treeward.sockets"):
        bound = bound_endpoint(sockets.router("tcp://0.0.0.0:0"))
        assert "INSECURE" in caplog.text
        caplog.clear()
        sockets.router(ANY_PORT)
    assert bound.startswith("tcp://0.0.0.0:")
    assert caplog.text == ""


@pytest.mark.parametrize(
    "endpoint, loopback",
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.8.9.10:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost.example.org:1", False),
        ("tcp://127.0.0.1.example.org:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::ffff:10.0.0.5]:1", False),
        ("tcp://192.168.0.1:1", False),
        ("tcp://:1", False),
    ],
)
def test_only_loopback_addresses_pass_for_loopback(endpoint: str, loopback: bool) -> None:
    assert is_loopback(endpoint) is loopback


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:port", "tcp://127.0.0.1:-1"]
)
def test_a_malformed_endpoint_is_a_mistake_in_the_configuration(sockets: Factory, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://host:port"):
        sockets.router(endpoint)
    with pytest.raises(ConfigError, match="tcp://host:port"):
        sockets.dealer(endpoint)


def test_an_ipc_socket_is_for_its_owner_only(sockets: Factory, tmp_path: Path) -> None:
    path = tmp_path / "ring"
    server = sockets.router(f"ipc://{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    client = sockets.dealer(f"ipc://{path}")
    client.send_multipart([b"hello"])
    assert receive(server)[1:] == [b"hello"]


def test_an_ipc_path_on_which_a_live_process_listens_is_not_taken_over(
    sockets: Factory, tmp_path: Path
) -> None:
    server = sockets.router(f"ipc://{tmp_path / 'ring'}")
    with pytest.raises(ConfigError, match="another process does"):
        sockets.router(f"ipc://{tmp_path / 'ring'}")
    client = sockets.dealer(f"ipc://{tmp_path / 'ring'}")
    client.send_multipart([b"still here"])
    assert receive(server)[1:] == [b"still here"]


def test_a_left_over_ipc_file_is_in_nobodys_way(sockets: Factory, tmp_path: Path) -> None:
    left_over = socket.socket(socket.AF_UNIX)
    left_over.bind(str(tmp_path / "ring"))
    left_over.close()
    sockets.router(f"ipc://{tmp_path / 'ring'}")
    with pytest.raises(ConfigError, match="does not exist"):
        sockets.router(f"ipc://{tmp_path / 'nowhere' / 'ring'}")


def test_a_refused_bind_leaves_no_socket_open(
    context: zmq.Context[zmq.Socket[bytes]], sockets: Factory
) -> None:
    with pytest.raises(SecurityError):
        sockets.router("tcp://0.0.0.0:0")
    with pytest.raises(ConfigError):
        sockets.dealer("tcp://127.0.0.1")
    context.term()  # would hang if a socket were left


# ------------------------------------------------------------------------------------------- options


def test_every_socket_is_made_with_the_measured_options(sockets: Factory, tmp_path: Path) -> None:
    made = {
        "router": sockets.router(ANY_PORT),
        "dealer": sockets.dealer("tcp://127.0.0.1:1"),
        "pub": sockets.pub(ANY_PORT),
        "sub": sockets.sub("tcp://127.0.0.1:1"),
        "push": sockets.push("tcp://127.0.0.1:1"),
        "pull": sockets.pull(ANY_PORT),
    }
    for name, made_socket in made.items():
        options = {
            option: made_socket.getsockopt(option)
            for option in (
                zmq.LINGER,
                zmq.SNDHWM,
                zmq.RCVHWM,
                zmq.SNDTIMEO,
                zmq.HEARTBEAT_IVL,
                zmq.HEARTBEAT_TIMEOUT,
            )
        }
        assert options[zmq.LINGER] >= 0, name
        assert 0 < options[zmq.SNDHWM] <= 1000, name
        assert 0 < options[zmq.RCVHWM] <= 1000, name
        assert options[zmq.SNDTIMEO] >= 0, name
        assert 0 < options[zmq.HEARTBEAT_IVL] < options[zmq.HEARTBEAT_TIMEOUT], name
        assert made_socket.getsockopt(zmq.MAXMSGSIZE) == 64 << 20, name
        assert made_socket.getsockopt(zmq.IMMEDIATE) == (name != "push"), name
        assert made_socket.getsockopt(zmq.ROUTING_ID) == b"", name


def test_sending_to_a_peer_that_is_gone_is_an_error_not_a_silent_loss(sockets: Factory) -> None:
    with pytest.raises(zmq.ZMQError) as caught:
        sockets.router(ANY_PORT).send_multipart([b"nobody", b"hello"])
    assert caught.value.errno == errno.EHOSTUNREACH


def send_for_ever(server: zmq.Socket[bytes], peer: bytes) -> None:
    for _ in range(10_000):
        server.send_multipart([peer, bytes(10_000)])


def test_a_peer_that_reads_nothing_does_not_block_the_router_and_the_others_are_served(
    sockets: Factory,
) -> None:
    server = sockets.router(ANY_PORT)
    deaf, good = sockets.dealer(bound_endpoint(server)), sockets.dealer(bound_endpoint(server))
    deaf.send(b"deaf")
    good.send(b"good")
    peers = {name: peer for peer, name in (receive(server), receive(server))}
    began = time.monotonic()
    with pytest.raises(zmq.Again):
        send_for_ever(server, peers[b"deaf"])
    server.send_multipart([peers[b"good"], b"hello"])
    assert receive(good) == [b"hello"]
    assert time.monotonic() - began < 5


def test_a_dealer_without_a_server_queues_nothing_and_says_so_in_time(sockets: Factory) -> None:
    client = sockets.dealer("tcp://127.0.0.1:1")
    client.setsockopt(zmq.SNDTIMEO, 50)
    with pytest.raises(zmq.Again):
        client.send_multipart([b"hello"])


def test_a_push_without_a_server_keeps_a_bounded_number_and_never_waits(sockets: Factory) -> None:
    sender = sockets.push("tcp://127.0.0.1:1")
    began = time.monotonic()
    for _ in range(1000):
        sender.send(b"metric")
    with pytest.raises(zmq.Again):
        sender.send(b"one too many")
    assert time.monotonic() - began < 1


def test_a_context_ends_although_its_peers_are_gone(
    sockets: Factory, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    server = sockets.router(ANY_PORT)
    client = sockets.dealer(bound_endpoint(server))
    client.send(b"hello")
    server.close(linger=0)
    client.close()
    began = time.monotonic()
    context.term()
    assert time.monotonic() - began < 5


def test_hints_and_metrics_find_their_way(sockets: Factory) -> None:
    publisher, sink = sockets.pub(ANY_PORT), sockets.pull(ANY_PORT)
    subscriber, source = sockets.sub(bound_endpoint(publisher)), sockets.push(bound_endpoint(sink))
    source.send(b"metric")
    assert receive(sink) == [b"metric"]
    for _ in range(100):  # a subscriber that is still connecting misses hints: that is what hints are
        publisher.send(b"hint")
        if subscriber.poll(50):
            break
    assert receive(subscriber) == [b"hint"]


def test_the_factory_makes_asyncio_sockets_from_an_asyncio_context() -> None:
    async def exchange() -> list[bytes]:
        context = zmq.asyncio.Context()
        sockets = SocketFactory(SecurityConfig(), context)
        server = sockets.router(ANY_PORT)
        client = sockets.dealer(bound_endpoint(server))
        await client.send_multipart([b"question"])
        peer, question = await server.recv_multipart()
        await server.send_multipart([peer, question, b"answer"])
        answer = await client.recv_multipart()
        context.destroy(linger=0)
        return answer

    assert asyncio.run(exchange()) == [b"question", b"answer"]


# ------------------------------------------------------------------------------------------ cut links


class Proxy:
    """A TCP relay whose connections can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            threading.Thread(target=self._relay, args=(client, server), daemon=True).start()

    @staticmethod
    def _relay(client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        try:
            while True:
                for ready in select.select(list(other), [], [])[0]:
                    if not (data := ready.recv(1 << 16)):
                        return
                    other[ready].sendall(data)
        except (OSError, ValueError):
            return

    def cut(self) -> None:
        for connection in self._open:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_link_that_was_cut_while_the_router_was_busy_heals_and_delivers_what_is_sent_then(
    sockets: Factory,
) -> None:
    """With an identity set on the client, libzmq 4.3.5 swallows all of it without an error."""
    server = sockets.router(ANY_PORT)
    proxy = Proxy(int(bound_endpoint(server).rpartition(":")[2]))
    client = sockets.dealer(f"tcp://127.0.0.1:{proxy.port}")
    client.send(b"before")
    old_peer, _ = receive(server)
    proxy.cut()
    time.sleep(0.5)  # the router's application is busy: it does not read while the client comes back
    for number in range(20):
        client.send(b"after %d" % number)
    arrived = [receive(server) for _ in range(20)]
    assert [body for _, body in arrived] == [b"after %d" % number for number in range(20)]
    assert {peer for peer, _ in arrived} != {old_peer}
    server.send_multipart([arrived[-1][0], b"answer"])
    assert receive(client) == [b"answer"]
    proxy.close()
