"""How many bytes this process has sent and received, by endpoint: every socket of `common.sockets` counts.

    socket.send_multipart ─▶ sent        TRAFFIC.by_endpoint() ─▶ journals (`usage`)
    socket.recv_multipart ─▶ received    TRAFFIC.totals()      ─▶ metrics

Counted are the frames that ZeroMQ accepted or handed over, the headers of our protocol included. Not counted
are what ZeroMQ adds (2 to 9 bytes a frame, heartbeats, handshakes) and TCP/IP below it. A ROUTER's routing id
never travels and is left out. What a PUB sends is counted once by its sender, and by each subscriber that it
reached; metrics are counted where they are sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import zmq
import zmq.asyncio


class Traffic:
    """Bytes by endpoint. Any thread may add and read."""

    def __init__(self) -> None:
        self._bytes: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    def add(self, endpoint: str, *, sent: int = 0, received: int = 0) -> None:
        """Count one message."""
        with self._lock:
            entry = self._bytes.setdefault(endpoint, [0, 0])
            entry[0] += sent
            entry[1] += received

    def by_endpoint(self) -> dict[str, list[int]]:
        """Endpoint -> [bytes sent, bytes received] since the start of the process."""
        with self._lock:
            return {endpoint: list(entry) for endpoint, entry in self._bytes.items()}

    def totals(self) -> dict[str, float]:
        """For metrics: `sent_bytes` and `received_bytes`, all sockets together."""
        found = self.by_endpoint().values()
        return {
            "sent_bytes": float(sum(sent for sent, _ in found)),
            "received_bytes": float(sum(received for _, received in found)),
        }


TRAFFIC = Traffic()
"""Of this process."""


class MeteredSocket(zmq.Socket[Any]):
    """A blocking socket that counts. `endpoint` is set once it is bound or connected."""

    endpoint: str = ""

    def send_multipart(self, msg_parts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """As in `zmq.Socket`."""
        done = super().send_multipart(msg_parts, *args, **kwargs)
        TRAFFIC.add(self.endpoint, sent=_size(self, msg_parts))
        return done

    def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
        """As in `zmq.Socket`."""
        parts = super().recv_multipart(*args, **kwargs)
        TRAFFIC.add(self.endpoint, received=_size(self, parts))
        return parts


class MeteredAsyncSocket(zmq.asyncio.Socket):
    """A socket of asyncio that counts. `endpoint` is set once it is bound or connected."""

    endpoint: str = ""

    def send_multipart(self, msg_parts: Any, *args: Any, **kwargs: Any) -> Any:
        """As in `zmq.asyncio.Socket`."""

        def count(future: asyncio.Future[Any]) -> None:
            if _succeeded(future):
                TRAFFIC.add(self.endpoint, sent=_size(self, msg_parts))

        return _when_done(super().send_multipart(msg_parts, *args, **kwargs), count)

    def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
        """As in `zmq.asyncio.Socket`."""

        def count(future: asyncio.Future[Any]) -> None:
            if _succeeded(future):
                TRAFFIC.add(self.endpoint, received=_size(self, future.result()))

        return _when_done(super().recv_multipart(*args, **kwargs), count)


def _size(socket: zmq.Socket[Any], parts: Sequence[Any]) -> int:
    """Bytes of the frames that travel."""
    return sum(len(part) for part in (parts[1:] if socket.type == zmq.ROUTER else parts))


def _succeeded(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


def _when_done(future: Any, count: Callable[[asyncio.Future[Any]], None]) -> Any:
    """Most calls are done when they return; a callback would only come a round of the loop later."""
    if future.done():
        count(future)
    else:
        future.add_done_callback(count)
    return future
