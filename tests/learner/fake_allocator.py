"""A tiny allocator for the learner's tests: a ROUTER in a thread that feeds synthetic trees within credit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from common.codec import decode, encode, new_id
from common.messages import (
    Bye,
    Committed,
    Consumed,
    Credit,
    Dropped,
    Durable,
    Heartbeat,
    Hello,
    Received,
    ToAllocator,
    TreeReady,
    Welcome,
)
from common.nouns import Tree, Version

RUN = "run"


class FakeAllocator:
    """Serves until closed. Trees come from `make(tree_id, newest version)`, at most `ahead` beyond the consumed.

    Everything the learner says is kept in `said`, duplicates by message id left out.
    """

    def __init__(
        self,
        make: Callable[[int, Version], Tree],
        *,
        ahead: int,
        total: int = 10_000,
        heartbeat_s: float = 0.2,
        dead_after_s: float = 1.0,
        endpoint: str = "tcp://127.0.0.1:0",
        deliver_twice: bool = False,
        refuse: Bye | None = None,
        run: str = RUN,
    ) -> None:
        self._run_id = run
        self._make, self._ahead, self._total = make, ahead, total
        self._heartbeat_s, self._dead_after_s = heartbeat_s, dead_after_s
        self._twice, self._refuse = deliver_twice, refuse
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.bind(endpoint)
        self.endpoint = self.router.getsockopt(zmq.LAST_ENDPOINT).decode()
        self.said: list[Any] = []
        self.hellos: list[Hello] = []
        self.times_delivered: Counter[int] = Counter()
        self.consumed: Counter[int] = Counter()
        self.committed: Counter[int] = Counter()
        self.dropped: dict[int, str] = {}
        self.arrivals: Counter[str] = Counter()
        """Messages by type, repeats included."""
        self.durable: set[bytes] = set()
        self.sent_ids: dict[bytes, int] = {}
        self.credit = self.sent = 0
        self.version: Version | None = None
        self.deaf = threading.Event()
        """While set, everything is read and nothing answered."""
        self.forgetful = threading.Event()
        """While set, nothing is confirmed as durable."""
        self.goodbye: Bye | None = None
        self.name = "allocator/1"
        """Of this process of the allocator."""
        self._ids: set[bytes] = set()
        self._incarnation = ""
        self._route: bytes | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10)
        self.router.close(0)
        self.context.term()

    def __enter__(self) -> FakeAllocator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, kind: type) -> list[Any]:
        """Messages of one type, in order of arrival."""
        return [message for message in list(self.said) if isinstance(message, kind)]

    def wait(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Until `condition` holds; fails with what was said otherwise."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            counts = Counter(type(message).__name__ for message in self.said)
            assert time.monotonic() < deadline, f"nothing came of it within {timeout_s} s: {counts}"
            time.sleep(0.01)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            if self.router.poll(10):
                route, *frames = self.router.recv_multipart()
                if not self.deaf.is_set():
                    self._handle(route, decode(frames, ToAllocator))
            if self.hellos and not self.deaf.is_set():
                self._feed()
                if self.goodbye is not None:
                    self._send(self.goodbye)
                    self.goodbye = None

    def _handle(self, route: bytes, envelope: Any) -> None:
        message = envelope.message
        self._route = route
        if self._refuse is not None:
            if isinstance(message, Hello):
                self._send(self._refuse)
            return
        if isinstance(message, Received):
            return
        if isinstance(message, Durable):
            self.durable.update(message.ids)
            return
        self.arrivals[type(message).__name__] += 1  # before the answer: who hears it may look
        if not isinstance(message, Hello):
            self._send(Received([envelope.id]))
            if not isinstance(message, Heartbeat) and not self.forgetful.is_set():
                self._send(Durable([envelope.id]))
        if envelope.id not in self._ids:
            self._ids.add(envelope.id)
            self.said.append(message)
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case Hello():
                self._hello(message)
            case Credit(total=total):
                self.credit = max(self.credit, total)
            case Consumed(trees=trees, version=version):
                self.consumed.update(trees)
                self.version = version
            case Committed(trees=trees):
                self.committed.update(trees)
            case Dropped(tree=tree, reason=reason):
                self.dropped[tree] = reason

    def _hello(self, hello: Hello) -> None:
        self.hellos.append(hello)
        if hello.incarnation != self._incarnation:
            self._incarnation, self.credit, self.sent = hello.incarnation, 0, 0
            self.version = hello.version
        self._send(
            Welcome(
                run=self._run_id, config_hash="c", tokenizer_hash=hello.tokenizer_hash,
                weights_endpoint=hello.weights_endpoint, hints_endpoint=hello.hints_endpoint,
                version=hello.version, heartbeat_s=self._heartbeat_s, dead_after_s=self._dead_after_s,
                seed=0, deterministic=False,
            )
        )  # fmt: skip

    def _feed(self) -> None:
        """Lowest ids first, each once, within credit and at most `ahead` that are not consumed or dropped."""
        for tree in self._next_trees():
            for _ in range(2 if self._twice else 1):
                msg_id = new_id()
                self.sent_ids[msg_id] = tree.id
                self._send(TreeReady(tree), msg_id)
            self.times_delivered[tree.id] += 1
            self.sent += 1

    def _next_trees(self) -> Iterator[Tree]:
        assert self.version is not None
        settled = len(self.consumed) + len(self.dropped)
        while (
            self.sent < self.credit
            and len(self.times_delivered) < min(self._total, settled + self._ahead)
        ):  # fmt: skip
            yield self._make(len(self.times_delivered), self.version)

    def _send(self, message: Any, msg_id: bytes | None = None) -> None:
        frames = encode(message, run=self._run_id, sender=self.name, msg_id=msg_id)
        self.router.send_multipart([self._route, *frames])
