"""The sending side of metrics: fire and forget, so that no role ever waits for a tracker.

    role ──log(step, name=value …)──▶ ZeroMQ's queue (bounded) ──PUSH──▶ tracker ──▶ MLflow

A tracker that is not there yet, slow or dead costs the role nothing but that queue; what no longer fits is
dropped and counted in `dropped`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

import zmq

from common.codec import encode, new_sender
from common.config import SecurityConfig
from common.errors import TreewardError
from common.messages import MAX_BATCH, Bye, Message, Metrics
from common.sockets import SocketFactory

LOG = logging.getLogger("treeward.metrics")

MAX_NAME = 128
CLOSE_MS = 1_000
"""Longest that `close` waits for the tracker to take what is queued."""


class MetricsClient:
    """Logs numbers of one role under one peer name; safe to call from several threads.

    An empty `endpoint` makes a client that counts and forgets, for runs without a tracker. Close it, or use
    it in a `with` statement: a ZeroMQ context that is collected with open sockets may wait for ever.
    """

    def __init__(
        self,
        endpoint: str,
        role: str,
        peer: str,
        *,
        run: str = "",
        security: SecurityConfig | None = None,
    ) -> None:
        self.dropped = 0
        """Messages lost, and values that were no numbers."""
        self._role, self._peer, self._run = role, peer[:MAX_NAME], run
        self._sender = new_sender(self._peer)
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        if endpoint:
            self._open(endpoint, security or SecurityConfig())

    def _open(self, endpoint: str, security: SecurityConfig) -> None:
        self._context = zmq.Context()
        try:
            self._socket = SocketFactory(security, self._context).push(endpoint)
        except TreewardError as error:
            LOG.warning("no metrics: %s", error)

    def log(self, step: int, /, **values: float) -> None:
        """Send `values` at `step`. Never blocks and never raises, whatever the values are."""
        with self._lock:
            numbers = self._numbers(values)
            names = list(numbers)
            for start in range(0, len(names), MAX_BATCH):
                self._send(step, {name: numbers[name] for name in names[start : start + MAX_BATCH]})

    def _numbers(self, values: dict[str, float]) -> dict[str, float]:
        """What can be sent; non-finite numbers too, since the tracker counts those."""
        numbers = {}
        for name, value in values.items():
            try:
                numbers[str(name)[:MAX_NAME] or "unnamed"] = float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):
                self.dropped += 1
        return numbers

    def _send(self, step: int, values: dict[str, float]) -> None:
        self._put(lambda: Metrics(role=self._role, peer=self._peer, step=max(0, int(step)), values=values))

    def _put(self, make: Callable[[], Message]) -> None:
        if self._socket is None:
            self.dropped += 1
            return
        try:
            frames = encode(make(), run=self._run, sender=self._sender)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except (TreewardError, zmq.ZMQError, TypeError, ValueError, OverflowError):
            self.dropped += 1

    def goodbye(self, code: int, reason: str) -> None:
        """Tell the tracker that the run ends, and how. Never blocks and never raises."""
        with self._lock:
            self._put(lambda: Bye(code, reason))

    def close(self) -> None:
        """Wait at most `CLOSE_MS` for the tracker to take what is queued, then let go. Never raises."""
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=CLOSE_MS)
                self._socket = None
            if self._context is not None:
                self._context.term()
                self._context = None

    def __enter__(self) -> MetricsClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
