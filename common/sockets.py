"""ZeroMQ sockets with options that were measured to be safe, and binds that do not expose a machine.

    allocator   router(bind) ◀── dealer(connect)   actors, learner
    learner     router(bind) ◀── dealer(connect)   weight pullers;   pub(bind) ──▶ sub(connect)   hints only
    tracker     pull(bind)   ◀── push(connect)     everyone

No socket sets an identity: after a cut link, a ROUTER that is busy would swallow what a named peer sends
without an error. ROUTERs raise `EHOSTUNREACH` for a peer that is gone (ROUTER_MANDATORY), and never block:
a peer whose queue is full raises `zmq.Again` at once, so that it cannot hold up the others. A successful
`send` means queued here, no more: see `common.outbox`. High-water marks are a safety net; credits bound work.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket as system_socket
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from urllib.parse import urlsplit

import psutil
import zmq
import zmq.asyncio

from common.codec import MAX_PAYLOAD_BYTES
from common.config import SecurityConfig, SecurityMode
from common.errors import ConfigError, SecurityError
from common.traffic import MeteredAsyncSocket, MeteredSocket

LOG = logging.getLogger("treeward.sockets")

LINGER_MS = 2_000
"""A peer that is gone must not hold up an exit; what matters was drained by acknowledgements before."""
HIGH_WATER_MARK = 1_000
SEND_TIMEOUT_MS = 5_000
HANDSHAKE_MS = 5_000
"""A port scanner that connects and says nothing is cut off after this."""
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 2_000, 6_000
"""ZMTP's own heartbeats only clear half-open connections; an application hang is noticed by `Heartbeat`."""
RECONNECT_MS, RECONNECT_MAX_MS = 100, 5_000
FORMS = "tcp://host:port or ipc://path"

SocketT = TypeVar("SocketT", bound="zmq.Socket[Any]")


class SocketFactory(Generic[SocketT]):
    """Makes every socket of a process from one context (`zmq.Context` or `zmq.asyncio.Context`).

    Raises:
        SecurityError: the security mode is not available, or a bind would expose an open port.
        ConfigError: an endpoint is malformed, in use, or not an address of this machine.
    """

    def __init__(self, security: SecurityConfig, context: zmq.Context[SocketT]) -> None:
        if security.mode is not SecurityMode.NONE:
            raise SecurityError(f"security.mode={security.mode.value} is not available in this release")
        self._security = security
        self._context = context

    def router(self, bind: str) -> SocketT:
        """Server side of a request protocol; sends never block."""
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDTIMEO, 0)
        return self._bind(socket, bind)

    def dealer(self, connect: str) -> SocketT:
        """Client side. Sends wait `SEND_TIMEOUT_MS` for a connection, then raise `zmq.Again`."""
        return self._connect(self._socket(zmq.DEALER), connect)

    def pub(self, bind: str) -> SocketT:
        """Hints that may be lost."""
        return self._bind(self._socket(zmq.PUB), bind)

    def sub(self, connect: str) -> SocketT:
        """Receives every hint that is not lost."""
        socket = self._socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        return self._connect(socket, connect)

    def push(self, connect: str) -> SocketT:
        """Metrics out; never blocks. Unlike elsewhere, they are queued for a tracker still to come."""
        socket = self._socket(zmq.PUSH)
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.SNDTIMEO, 0)
        return self._connect(socket, connect)

    def pull(self, bind: str) -> SocketT:
        """Metrics in."""
        return self._bind(self._socket(zmq.PULL), bind)

    def _socket(self, kind: int) -> SocketT:
        asynchronous = isinstance(self._context, zmq.asyncio.Context)
        metered: Any = MeteredAsyncSocket if asynchronous else MeteredSocket
        socket: Any = self._context.socket(kind, socket_class=metered)
        for option, value in (
            (zmq.LINGER, LINGER_MS),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.IMMEDIATE, 1),  # queue for live connections only
            (zmq.SNDTIMEO, SEND_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
            (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            (zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES),
        ):
            socket.setsockopt(option, value)
        return cast("SocketT", socket)

    def _bind(self, socket: SocketT, endpoint: str) -> SocketT:
        try:
            _check_port(endpoint)
            self._check_bind(endpoint)
            _allow_ipv6(socket, endpoint)
            socket.bind(endpoint)
            _name(socket, bound_endpoint(socket))
            if endpoint.startswith("ipc://"):
                Path(endpoint.removeprefix("ipc://")).chmod(0o600)
        except zmq.ZMQError as error:
            socket.close(0)
            raise _bind_error(endpoint, error) from error
        except BaseException:
            socket.close(0)
            raise
        return socket

    def _connect(self, socket: SocketT, endpoint: str) -> SocketT:
        try:
            _check_port(endpoint)
            _allow_ipv6(socket, endpoint)
            socket.connect(endpoint)
            _name(socket, endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}; give {FORMS}") from error
        except BaseException:
            socket.close(0)
            raise
        return socket

    def _check_bind(self, endpoint: str) -> None:
        if endpoint.startswith("ipc://"):
            _check_ipc(endpoint)
        elif not is_loopback(endpoint):
            if not self._security.allow_insecure_bind:
                raise SecurityError(
                    f"refusing to listen on {endpoint} without keys: whoever reaches the port could join "
                    "the run; use 127.0.0.1, or security.allow_insecure_bind=true inside a network you trust"
                )
            LOG.warning(
                "INSECURE: listening on %s without keys; anyone who reaches it can join the run", endpoint
            )


def bound_endpoint(socket: zmq.Socket[Any]) -> str:
    """Where a bound socket really listens: the port is filled in when 0 was asked for."""
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    return (found if isinstance(found, bytes) else str(found).encode()).rstrip(b"\0").decode()


def _name(socket: Any, endpoint: str) -> None:
    """The endpoint under which the socket's bytes are counted."""
    socket.endpoint = endpoint


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp endpoint is reachable from this machine only; of names, only localhost is trusted."""
    try:
        host = urlsplit(endpoint).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_port(endpoint: str) -> None:
    """libzmq takes the low 16 bits of any number and listens elsewhere without a word."""
    if endpoint.startswith("tcp://"):
        port = endpoint.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ConfigError(f"{endpoint} has no port between 0 and 65535; give {FORMS}")


def _allow_ipv6(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Only for literal IPv6 addresses: elsewhere it would turn `*` into both families."""
    if endpoint.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)


def _check_ipc(endpoint: str) -> None:
    """libzmq deletes a socket file that is in the way, even when a live process listens on it."""
    path = endpoint.removeprefix("ipc://")
    if not Path(path).parent.is_dir():
        raise ConfigError(f"cannot listen on {endpoint}: the directory {Path(path).parent} does not exist")
    probe = system_socket.socket(system_socket.AF_UNIX)
    try:
        probe.connect(path)
    except OSError:
        return
    finally:
        probe.close()
    raise ConfigError(f"cannot listen on {endpoint}: another process does; stop it or choose another path")


def _bind_error(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    match error.errno:
        case errno.EADDRINUSE:
            holder = _holder(endpoint)
            what = f"the port is in use{holder}; stop that process, or choose another port (0 = any free one)"
        case errno.EADDRNOTAVAIL | errno.ENODEV:
            what = "it is not an address of this machine"
        case errno.EACCES:
            what = "permission denied; choose a port above 1023"
        case _:
            what = f"{os.strerror(error.errno or 0)}; give {FORMS}"
    return ConfigError(f"cannot listen on {endpoint}: {what}")


def _holder(endpoint: str) -> str:
    """` by process 123 (name)` when the system lets us see it."""
    port = urlsplit(endpoint).port
    try:
        for found in psutil.net_connections(kind="tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid:
                return f" by process {found.pid} ({psutil.Process(found.pid).name()})"
    except (psutil.Error, OSError):
        return ""
    return ""
