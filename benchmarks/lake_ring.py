"""One run of the ring whose policy stands still: the allocator and its actors, a learner that only listens.

    run.py role=allocator ◀── messages ──▶ run.py role=actor × N        real processes over real sockets
              │ TreeReady                        ▲ weights
              └────────▶ Audience ───────────────┘   takes trees, says it trained on them, changes nothing

consumes: settings, the folder of a model.  produces: the trees of the run, in canonical order.
waits for: trees.  unblocked by: the allocator's deliveries, or a process that ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from benchmarks.children import POLL_S
from benchmarks.cli import compose, fresh_run
from benchmarks.results import ROOT, BenchmarkFailed
from common.cli import latest
from common.codec import new_sender
from common.config import Config, agreed_settings
from common.messages import PROTOCOL_VERSION, Bye, Capabilities, Committed, Consumed, Credit, Hello
from common.nouns import Tree, Version
from common.opening import MODEL_FILES
from common.processes import Child, Lifeline, describe_exit, spawn, stop_all
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from learner.link import AllocatorLink, Delivered, Event
from learner.publish import VersionStore
from learner.serve import WeightsServer

ANY_PORT = "tcp://127.0.0.1:0"
PATIENCE_S = 900.0
"""A run takes a minute; on a crowded machine some."""
DRAIN_S, GOODBYE_S, GRACE_S = 10.0, 2.0, 10.0


@dataclass(frozen=True, slots=True)
class Ring:
    """Where and how a run is made."""

    path: Path
    """Of the run; a run that is there is removed."""
    model: Path
    """Folder of the policy."""
    words: tuple[str, ...]
    """Settings of all roles."""
    noisy: bool = False
    """Whether the success predictor's answers are noise."""
    actors: int = 2
    republished: bool = False
    """Whether each update serves the same weights again under its own number: then `learner.max_policy_lag`
    bounds the trees in flight, as in a training."""


class Audience:
    """The learner's end of the wire, without a learner.

    Raises:
        SecurityError, ConfigError: an endpoint cannot be bound.
    """

    def __init__(
        self, config: Config, run: str, model: Path, stack: ExitStack, republished: bool = False
    ) -> None:
        self.trees: list[Tree] = []
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._batch, self._steps = config.learner.batch_trees, config.learner.steps
        self._files = {name: (model / name).read_bytes() for name in MODEL_FILES}
        self._republished = republished
        self._store = store = VersionStore(1)
        store.publish(Version(0, 0), self._files)
        server = WeightsServer(store, ANY_PORT, ANY_PORT, config.security, run)
        stack.callback(server.close)
        name, _, incarnation = (sender := new_sender("learner")).partition("/")
        hello = Hello(
            role="learner", peer=name, incarnation=incarnation, protocol=PROTOCOL_VERSION,
            capabilities=Capabilities(deterministic=config.deterministic), agreed=agreed_settings(config),
            weights_endpoint=server.weights_endpoint, hints_endpoint=server.hints_endpoint,
            tokenizer_hash=WordTokenizer.load(model).sha256, version=Version(0, 0),
        )  # fmt: skip
        self._link = AllocatorLink(
            config.cluster, config.security, sender, lambda: hello, self._events.put, run
        )
        stack.callback(self._link.close)
        self._link.send(Credit(self._batch * self._steps))

    @property
    def satisfied(self) -> bool:
        """Whether all trees of the run are here."""
        return len(self.trees) >= self._batch * self._steps

    def listen(self, seconds: float) -> None:
        """Take what comes within so long.

        Raises:
            TreewardError: the line to the allocator is lost.
        """
        try:
            event = self._events.get(timeout=seconds)
        except Empty:
            return
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Delivered):
            self._take(event)

    def _take(self, event: Delivered) -> None:
        self._link.durable([event.id])
        if all(tree.id != event.tree.id for tree in self.trees):
            self.trees.append(event.tree)
            if len(self.trees) % self._batch == 0:
                numbers = [tree.id for tree in self.trees[-self._batch :]]
                version = Version(0, len(self.trees) // self._batch)
                if self._republished:
                    self._store.publish(version, self._files)
                self._link.send(Consumed(numbers, version))
                self._link.send(Committed(version, numbers))

    def leave(self) -> None:
        """The run is complete."""
        self._link.drain(DRAIN_S)
        self._link.send(Bye(0, "all trees are here"))
        self._link.drain(GOODBYE_S)  # an allocator that has gone already cannot acknowledge it


def grow(ring: Ring) -> list[Tree]:
    """Make a run and return its trees, by wave and id.

    Raises:
        BenchmarkFailed: a process ended too early, or the run takes too long.
    """
    path = fresh_run(ring.path)
    where = [f"run={path}", f"cluster.allocator={ANY_PORT}"]
    door = ["-m", "benchmarks.noisy_allocator"] if ring.noisy else [str(ROOT / "run.py"), "role=allocator"]
    children: list[Child] = []
    with ExitStack() as stack:
        lifeline = stack.enter_context(Lifeline())
        stack.callback(lambda: stop_all(children, GRACE_S))

        def start(name: str, words: Sequence[str]) -> None:
            command = [sys.executable, *words]
            log = path.with_suffix(f".{name}.out")
            log.unlink(missing_ok=True)
            children.append(spawn(name, command, log=log, lifeline=lifeline, cwd=ROOT))

        start("allocator", [*door, *latest([*ring.words, *where])])
        endpoint = _endpoint(path, children)
        for number in range(ring.actors):
            own = [f"cluster.allocator={endpoint}", f"actor.name=actor-{number}"]
            words = latest(["role=actor", *ring.words, *own, f"actor.dir={path}/actors/actor-{number}"])
            start(f"actor-{number}", [str(ROOT / "run.py"), *words])
        config = compose([f"run={path}", "role=learner", f"cluster.allocator={endpoint}"])
        audience = Audience(config, path.name, ring.model, stack, ring.republished)
        trees = _listen(audience, children)
    return sorted(trees, key=lambda tree: (tree.wave, tree.id))


def _endpoint(path: Path, children: Sequence[Child]) -> str:
    """Where the allocator listens, once it does."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.is_dir() or (found := RunDir(path).endpoint("allocator")) is None:
        _check(children, deadline)
        time.sleep(POLL_S)
    return found


def _listen(audience: Audience, children: Sequence[Child]) -> list[Tree]:
    deadline = time.monotonic() + PATIENCE_S
    while not audience.satisfied:
        audience.listen(POLL_S)
        _check(children, deadline)
    audience.leave()
    return audience.trees


def _check(children: Sequence[Child], deadline: float) -> None:
    for child in children:
        code = child.exit_code()
        if code is not None:
            last = child.last_lines()
            raise BenchmarkFailed(f"{child.name} ended with {describe_exit(code)}: {last}; see {child.log}")
    if time.monotonic() > deadline:
        logs = ", ".join(str(child.log) for child in children)
        raise BenchmarkFailed(f"the run takes longer than {PATIENCE_S:g} s; see {logs}")
