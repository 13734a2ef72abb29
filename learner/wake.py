"""Waking a thread that waits on sockets, from another thread."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import zmq


class Wake:
    """An inproc pair: the waiting thread polls `receiver`, any other calls `up`.

    PAIR, no high-water mark needed: a wake-up that does not fit adds nothing to those that wait.
    """

    def __init__(self, context: zmq.Context[Any]) -> None:
        endpoint = f"inproc://wake-{secrets.token_hex(8)}"
        self.receiver: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.receiver.bind(endpoint)
        self._sender: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._sender.setsockopt(zmq.LINGER, 0)
        self._sender.connect(endpoint)
        self._lock = threading.Lock()

    def up(self) -> None:
        """Wake the waiting thread. Never blocks, harmless after `close`."""
        with self._lock:
            if not self._sender.closed:
                try:
                    self._sender.send(b"", zmq.NOBLOCK)
                except zmq.Again:
                    return

    def clear(self) -> None:
        """Called by the waiting thread once it is awake."""
        while self.receiver.poll(0):
            self.receiver.recv()

    def close(self) -> None:
        """Close the waking side; the waiting thread closes `receiver` itself."""
        with self._lock:
            self._sender.close(0)
