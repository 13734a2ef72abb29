"""The ring for the oracle: real processes over real sockets, and what they leave behind.

warm start ─▶ allocator ─▶ learner, actors ─▶ all exit 0 ─▶ checkpoints (weights), journal (decisions)
"""

from __future__ import annotations

import hashlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from allocator.core import AllocatorCore
from common.config import Config
from common.journal import Record, read_journal
from common.messages import Grant, ToAllocator, TreeReady
from common.nouns import Lease, Tree
from common.processes import Child, Lifeline, spawn, stop_all
from common.rundir import RunDir
from tests.run.door import ROOT, compose

ANY_PORT = "tcp://127.0.0.1:0"
PATIENCE_S = 240.0
"""A whole run takes seconds; on a crowded machine the imports of its processes alone may take a minute."""


class Ring:
    """Starts the roles of one run by hand, as a person would in several terminals.

    Args:
        folder: empty; the run, the actors' directories and the logs go there.
        words: settings of the run, as typed.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self.words = folder, [*words, "tracking=none"]
        self.path = folder / "run"
        self.children: dict[str, Child] = {}

    def __enter__(self) -> Ring:
        self._lifeline = Lifeline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop_all(list(self.children.values()), 0)
        self._lifeline.close()

    def train(self, actors: int, disturb: Callable[[Ring], None] | None = None) -> None:
        """A run from its first process to its last; `disturb` is called once all have been started."""
        self.start("allocator", f"run={self.path}", *self.words, f"cluster.allocator={ANY_PORT}")
        self.wait(lambda: self._listens() is not None)
        allocator = f"cluster.allocator={self._listens()}"
        ports = [f"cluster.weights={ANY_PORT}", f"cluster.hints={ANY_PORT}"]
        self.start("learner", f"run={self.path}", allocator, *ports)
        for name in (f"actor-{number}" for number in range(actors)):
            self.start(name, *self.words, allocator, f"actor.name={name}", "actor.dir=.")
        if disturb is not None:
            disturb(self)
        self.wait(lambda: all(child.exit_code() == 0 for child in self.children.values()))

    def _listens(self) -> str | None:
        return RunDir(self.path).endpoint("allocator") if self.path.is_dir() else None

    def start(self, name: str, *words: str) -> None:
        """A role as its own process, in a directory of its own that was empty."""
        cwd = self.folder / name
        cwd.mkdir(parents=True)
        command = [sys.executable, str(ROOT / "run.py"), f"role={name.partition('-')[0]}", *words]
        log = self.folder / "logs" / f"{name}.out"
        self.children[name] = spawn(name, command, log=log, lifeline=self._lifeline, cwd=cwd)

    def kill(self, name: str) -> None:
        """`kill -9`: no goodbye, and nobody starts it again."""
        child = self.children.pop(name)
        child.signal(signal.SIGKILL)
        child.process.wait()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds; fails at once with a process's last words when one ends that should not have."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for child in self.children.values():
                assert not child.exit_code(), f"{child.name}: exit {child.exit_code()}: {child.last_lines()}"
            assert time.monotonic() < deadline, {c.name: c.last_lines() for c in self.children.values()}
            time.sleep(0.05)

    # --- what it left behind -----------------------------------------------------------------------------

    def config(self) -> Config:
        """The settings that the run wrote down."""
        return compose(f"run={self.path}")

    def weights(self, step: int) -> dict[str, Tensor]:
        """The model's tensors after update `step`."""
        return load_file(RunDir(self.path).checkpoints / f"step-{step:08d}" / "model.safetensors")

    def journal(self) -> list[Record]:
        return list(read_journal(RunDir(self.path).allocator_journal))

    def decisions(self) -> Decisions:
        """What the allocator decided, from the replay of its journal."""
        core, found = AllocatorCore.from_config(self.config(), self.path.name), Decisions()
        for record in self.journal():
            if record.kind == "input":
                message = msgspec.convert(record.fields["message"], ToAllocator, builtin_types=(bytes,))
                sends = core.handle(record.fields["peer"], message, record.fields["now"]).sends
            else:
                sends = core.tick(record.fields["now"]) if record.kind == "tick" else []
            if record.kind == "recovered":
                core.restart(record.fields["boot"], record.fields["now"])
            for message in (send.message for send in sends):
                if isinstance(message, TreeReady):
                    found.trees[message.tree.id] = message.tree
                elif isinstance(message, Grant):
                    found.leases += message.leases
            found.most_trees = max(found.most_trees, core.open_trees)
        return found


@dataclass
class Decisions:
    """Of one run of the allocator."""

    trees: dict[int, Tree] = field(default_factory=dict)
    """Finished trees as delivered, by id."""
    leases: list[Lease] = field(default_factory=list)
    """Every attempt, in order of its grant."""
    most_trees: int = 0
    """Most trees in flight at once."""


def warm_start(folder: Path, *words: str) -> Path:
    """Starting weights that know the actions' words, made by `role=warmstart`; the model's folder."""
    with Ring(folder, words) as ring:
        ring.start("warmstart", f"run={ring.path}", *ring.words)
        ring.wait(lambda: ring.children["warmstart"].exit_code() == 0)
    return RunDir(ring.path).warmstart_model


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()
