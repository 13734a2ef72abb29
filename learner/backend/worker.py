"""One learner on several ranks: rank 0 gives the orders, and every rank carries them out with it.

    rank 0    Ranks.start ─ update ─ state_files ─ full_weights ─ … ─ end
                 │announce       (its own part of the same call, at the same time)
    rank 1…   run_rank: wait ─▶ start │ update │ state │ weights │ end ─▶ wait …

consumes: orders of rank 0.  produces: this rank's part of gradients, state and weights.
waits for: rank 0, for as long as it lives.  unblocked by: an order, or the loss of rank 0 (an error).

Rank 0 alone has the allocator, the queue, the journal, checkpoints and publishing. Trees reach the others
with the order, in msgpack, checked on arrival. Every rank reads the folder that a run starts from: on several
machines the run directory is on a file system that they share.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
from torch import Tensor

from common.config_backend import BackendConfig
from common.errors import ConfigError, StorageError
from common.nouns import Tree
from learner.backend.base import Backend
from learner.backend.group import Group, open_group
from learner.rows import Clock

LOG = logging.getLogger("treeward.learner.rank")

R_co = TypeVar("R_co", covariant=True)


class Trains(Protocol[R_co]):
    """What `learner.update.Updater` is to a rank."""

    def update(self, trees: Sequence[Tree], clock: Clock) -> R_co:
        """One batch; called on every rank with the same arguments. Collective."""
        ...

    def state_files(self) -> dict[str, bytes]:
        """What a checkpoint holds beside the backend's files; the same on every rank."""
        ...


class Start(msgspec.Struct, tag="start", frozen=True):
    """Load the model in this folder; with `state`, the optimiser's too."""

    folder: str
    state: bool


class Update(msgspec.Struct, tag="update", frozen=True):
    """Train on these."""

    trees: list[Tree]
    clock: Clock


class State(msgspec.Struct, tag="state", frozen=True):
    """Send this rank's part of a checkpoint."""


class Weights(msgspec.Struct, tag="weights", frozen=True):
    """Take part in gathering the weights."""


class End(msgspec.Struct, tag="end", frozen=True):
    """Leave."""


Order = Start | Update | State | Weights | End
FILES = msgspec.msgpack.Decoder(dict[str, bytes])

Build = Callable[[Group, Path], tuple[Backend, Trains[R_co]]]
"""From a folder with a model to this rank's backend and updater: the same function on every rank."""


class Ranks(Generic[R_co]):
    """Rank 0's hold on all ranks; with one rank, plain calls. Each method is an order that all carry out."""

    def __init__(self, group: Group, build: Build[R_co], folder: Path, *, resumed: bool) -> None:
        """Build the backend on every rank, from `folder`.

        Args:
            resumed: it is a checkpoint, with the files of the optimiser.

        Raises:
            StorageError: the optimiser's files do not fit the backend, its world or its stage.
            RankLost: as every method does.
        """
        self._group = group
        self._tell(Start(str(folder.absolute()), resumed))
        self.backend, self.updater = build(group, folder)
        if resumed:
            load_state(self.backend, folder)

    def update(self, trees: Sequence[Tree], clock: Clock) -> R_co:
        """One batch on all ranks; what the updater returns on rank 0."""
        self._tell(Update(list(trees), clock))
        return self.updater.update(trees, clock)

    def state_files(self) -> dict[str, bytes]:
        """The optimiser's files of all ranks, for a checkpoint."""
        self._tell(State())
        found: dict[str, bytes] = {}
        for part in self._group.gather(msgspec.msgpack.encode(self.backend.state_files())):
            found.update(FILES.decode(part))
        return {**found, **self.updater.state_files()}

    def full_weights(self) -> dict[str, Tensor]:
        """What is trained, whole, by name."""
        self._tell(Weights())
        return self.backend.full_weights()

    def end(self) -> None:
        """Let the others leave. Not after a `RankLost`: nobody is there to hear it."""
        self._tell(End())

    def _tell(self, order: Order) -> None:
        if self._group.world > 1:
            self._group.announce(msgspec.msgpack.encode(order))


def run_rank(settings: BackendConfig, logs: Path, build: Build[object]) -> int:
    """A rank that is not 0, from joining the others to its end; returns the exit code.

    Signals to end are left to rank 0: this rank goes when it is told, or when rank 0 is gone.

    Raises:
        RankLost: rank 0 or another rank is gone.
        StorageError, ConfigError: as rank 0 raises them too; also where this is rank 0 after all, which would
            wait for its own orders.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    with open_group(settings, logs) as group:
        if group.rank == 0:
            raise ConfigError(
                f"RANK in the environment must be 0 for rank 0 of {group.world}: let a launcher set RANK and "
                "WORLD_SIZE, or unset both"
            )
        LOG.info("rank %d of %d on %s", group.rank, group.world, group.device)
        follow(group, build)
    return 0


def follow(group: Group, build: Build[object]) -> None:
    """Carry out orders until `End`."""
    orders = msgspec.msgpack.Decoder(Order)
    backend, updater = _begin(group, orders.decode(group.wait()), build)
    while True:
        match orders.decode(group.wait()):
            case Update(trees, clock):
                updater.update(trees, clock)
            case State():
                group.gather(msgspec.msgpack.encode(backend.state_files()))
            case Weights():
                backend.full_weights()
            case End():
                return
            case Start():
                raise RuntimeError("rank 0 started twice")


def _begin(group: Group, order: Order, build: Build[object]) -> tuple[Backend, Trains[object]]:
    if not isinstance(order, Start):
        raise RuntimeError(f"rank 0 began with {type(order).__name__}")
    folder = Path(order.folder)
    backend, updater = build(group, folder)
    if order.state:
        load_state(backend, folder)
    return backend, updater


def load_state(backend: Backend, folder: Path) -> None:
    """Put the optimiser's files of a checkpoint into this rank's backend. Collective.

    Raises:
        StorageError: they cannot be read, or do not fit.
    """
    files: dict[str, bytes] = {}
    for name in backend.state_names():
        try:
            files[name] = (folder / name).read_bytes()
        except FileNotFoundError as error:
            there = ", ".join(sorted(path.name for path in folder.glob("optimizer*"))) or "none"
            raise StorageError(
                f"{folder} lacks {name}, its files of the optimiser are: {there}; resume with the "
                "learner.backend name, zero_stage and processes that it was made with"
            ) from error
        except OSError as error:
            raise StorageError(f"{folder / name} cannot be read: {error.strerror}") from error
    backend.load_state(files)
