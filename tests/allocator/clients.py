"""Peers of an allocator behind sockets: a client that keeps what it is told, and an actor and a learner of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from common.codec import decode, encode, new_id
from common.config import Config, SecurityConfig, agreed_settings
from common.messages import (
    PROTOCOL_VERSION,
    AllocatorToActor,
    AllocatorToLearner,
    Bye,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Durable,
    Expanded,
    Finished,
    Grant,
    Hello,
    Inspect,
    Inspected,
    Message,
    Received,
    Starting,
    TreeReady,
    Welcome,
)
from common.nouns import Lease, Version
from common.sockets import SocketFactory
from tests.allocator.harness import ROOT, turn, win

WAIT_S = 20.0
"""Longest wait for anything below; all of it takes milliseconds on an idle machine."""


def until(done: Callable[[], bool], step: Callable[[], object], told: Callable[[], object] = str) -> None:
    """Take steps until it is done; whoever waits too long hears what was told."""
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s: {told()}"
        step()


class Client:
    """A peer: one DEALER, one incarnation, everything that came kept in `inbox`."""

    def __init__(self, endpoint: str, role: str, name: str, run: str, incarnation: str = "1") -> None:
        self.role, self.name, self.run = role, name, run
        self.incarnation = incarnation
        self.key = f"{name}/{incarnation}"
        self.context = zmq.Context()
        self.endpoint = endpoint
        self.socket = SocketFactory(SecurityConfig(), self.context).dealer(endpoint)
        self.union = AllocatorToActor if role == "actor" else AllocatorToLearner
        self.inbox: list[Any] = []
        self.received: set[bytes] = set()
        self.durable: set[bytes] = set()
        self.heard_from: list[str] = []
        """Processes of the allocator, in the order in which they were first heard."""
        self.confirm = True

    def say(self, message: Message, msg_id: bytes | None = None) -> bytes:
        msg_id = msg_id or new_id()
        self.socket.send_multipart(encode(message, run=self.run, sender=self.key, msg_id=msg_id))
        return msg_id

    def hello(self, config: Config, version: Version | None = None, slots: int = 8, **changes: Any) -> None:
        agreed = agreed_settings(config) | changes
        can = Capabilities(slots=slots, prefetch=2) if self.role == "actor" else Capabilities()
        self.say(
            Hello(self.role, self.name, self.incarnation, PROTOCOL_VERSION, can, agreed, version=version)
        )

    def hear(self, seconds: float = 0.05) -> None:
        """Take what comes for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.socket.poll(int(1000 * left) + 1):
            envelope = decode(self.socket.recv_multipart(), self.union)
            if envelope.sender not in self.heard_from:
                self.heard_from.append(envelope.sender)
            match envelope.message:
                case Received(ids=ids):
                    self.received |= set(ids)
                case Durable(ids=ids):
                    self.durable |= set(ids)
                case message:
                    self.inbox.append(message)
                    if self.confirm and not isinstance(message, Welcome):
                        self.say(Durable([envelope.id]))
                    return

    def wait(self, kind: type[Any]) -> Any:
        """The next message of a kind."""

        def place() -> int | None:
            return next((i for i, message in enumerate(self.inbox) if isinstance(message, kind)), None)

        until(
            lambda: place() is not None,
            self.hear,
            lambda: f"{self.key} has no {kind.__name__} in {self.inbox}",
        )
        return self.inbox.pop(place())  # type: ignore[arg-type]

    def wait_durable(self, msg_id: bytes) -> None:
        until(lambda: msg_id in self.durable, self.hear, lambda: "never confirmed as durable")

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


class FakeActor(Client):
    """Works off whatever it is granted, two turns a lease."""

    def step(self) -> None:
        self.hear(0.01)
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case Inspect(tree=tree, task=task):
                    self.say(Inspected(tree, task, ROOT))
                case Grant(leases=leases):
                    for lease in leases:
                        self.play(lease)
                case Bye():
                    self.inbox.append(message)

    def first_leases(self) -> list[Lease]:
        """Set up the first tree it is asked for, and take what is granted then."""
        inspect = self.wait(Inspect)
        self.say(Inspected(inspect.tree, inspect.task, ROOT))
        leases: list[Lease] = self.wait(Grant).leases
        return leases

    def play(self, lease: Lease, turns: int = 2) -> None:
        self.say(Starting(lease.id, Version(0, 0)))
        reward = float(lease.seed & 1)
        for offset in range(lease.offset, turns):
            last = offset == turns - 1
            self.say(Expanded(lease.id, offset, turn(lease, offset, last, reward=reward * last)))
        self.say(Finished(lease.id, turns, win(reward)))


class FakeLearner(Client):
    """Consumes every full batch at once, commits it, and says goodbye after the last."""

    def __init__(self, *args: Any, config: Config, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config, self.version = config, Version(0, 0)
        self.trees: list[int] = []
        self.trained: list[int] = []

    def join(self) -> None:
        self.hello(self.config, version=self.version)
        self.say(Credit(4 * self.config.learner.batch_trees))

    @property
    def done(self) -> bool:
        return self.version.step == self.config.learner.steps

    def step(self) -> None:
        self.hear(0.01)
        self.trees += [m.tree.id for m in self.inbox if isinstance(m, TreeReady)]
        self.inbox = [m for m in self.inbox if isinstance(m, Bye)]
        batch = self.config.learner.batch_trees
        if len(self.trees) >= batch and not self.done:
            trees, self.trees = self.trees[:batch], self.trees[batch:]
            self.version = Version(0, self.version.step + 1)
            self.trained += trees
            self.say(Consumed(trees, self.version))
            last = self.say(Committed(self.version, trees))
            if self.done:
                self.wait_durable(last)
                self.say(Bye(0, "done"))
