"""The ranks of the learner: how they find each other, and how a lost one ends the run.

    rank 0 ─ starts ranks 1… (unless a launcher did) ─▶ store ─▶ process group: gloo on the CPU, nccl on GPUs
       │
       ├─ announce(bytes) ───────────▶ wait: every other rank, for as long as rank 0 lives
       └─ watch: a started rank that has ended while it was needed ends this process too

consumes: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT of a launcher, or
`learner.backend.processes`.  waits for: other ranks in a collective, at most `collective_timeout_s`.
unblocked by: them, or the loss of one.

What ranks tell each other is bytes of msgpack in uint8 tensors, their length first; nothing is pickled.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from common.config_backend import BackendConfig
from common.errors import PeerLost, TreewardError
from common.processes import Child, Lifeline, describe_exit, spawn, stop_all
from common.ranks import given_world
from learner.device import choose_device

LOG = logging.getLogger("treeward.learner.group")

STORES: Any = dist
"""torch's stores, which its own annotations do not export."""
POLL_S = 0.02
"""How often a waiting rank looks for an order of rank 0."""
PATIENCE_S = 1.0
"""A rank that broke a connection may take this long to be seen as ended."""
LEAVE_S = 20.0
"""How long started ranks may take to leave at the end."""
GRACE_S = 5.0
"""How long the main thread may take to notice a lost rank by itself. A collective of nccl never does."""
WATCH_S = 0.5


class RankLost(TreewardError):
    """A rank of the learner has ended or is silent: its shards are gone, and the others cannot go on."""

    exit_code = PeerLost.exit_code


class Group:
    """All ranks of one learner, of which this process is one. Use it from one thread."""

    def __init__(
        self, rank: int, world: int, device: torch.device, store: c10d.Store, timeout_s: float,
        children: Sequence[Child] = (), lifeline: Lifeline | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.device = rank, world, device
        self._timeout_s = timeout_s
        self._raw_store = store
        self._store = STORES.PrefixStore("treeward", store)
        self._words, self._joined = 0, False
        self._children, self._lifeline = list(children), lifeline
        self._closing = threading.Event()
        if world > 1:
            self.join()
        if self._children:
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def join(self) -> None:
        """Make torch's process group: at once with several ranks, and for a library that wants one."""
        if self._joined:
            return
        names = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        with self.guard("the ranks to find each other"):
            dist.init_process_group(
                names,
                store=self._raw_store,
                rank=self.rank,
                world_size=self.world,
                timeout=timedelta(seconds=self._timeout_s),
            )
        self._joined = True

    # ------------------------------------------------------------------------------------- telling and asking

    def announce(self, data: bytes) -> None:
        """From rank 0 to everybody who is in `wait`."""
        self._words += 1
        with self.guard("the other ranks to take an order"):
            self._store.set(f"word/{self._words}", str(len(data)))
            self._store.delete_key(f"word/{self._words - 2}")  # everybody has answered to what came after it
            self._send(data)

    def wait(self) -> bytes:
        """The next bytes that rank 0 announces, however long that takes.

        Raises:
            RankLost: rank 0 is gone.
        """
        self._words += 1
        key = f"word/{self._words}"
        while not self._has(key):
            time.sleep(POLL_S)
        with self.guard("rank 0"):
            return self._receive(int(self._store.get(key)))

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on rank 0; nothing elsewhere. Collective."""
        if self.world == 1:
            return [data]
        with self.guard("the state of every rank"):
            sizes = torch.zeros(self.world, dtype=torch.int64)
            sizes[self.rank] = len(data)
            dist.all_reduce(sizes)
            if self.rank > 0:
                if data:
                    dist.send(as_tensor(data), 0)
                return []
            found = [data]
            for rank, size in enumerate(sizes.tolist()[1:], start=1):
                buffer = torch.empty(size, dtype=torch.uint8)
                if size:
                    dist.recv(buffer, rank)
                found.append(buffer.numpy().tobytes())
            return found

    def sum(self, values: Tensor) -> Tensor:
        """Σ over ranks of a tensor of one shape, in place. Collective."""
        if self.world > 1:
            with self.guard("the sum over ranks"):
                dist.all_reduce(values)
        return values

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} of the learner lost rank 0: {first_line(error)}") from error

    def _send(self, data: bytes) -> None:
        if self.world > 1 and data:
            dist.broadcast(as_tensor(data), 0)

    def _receive(self, size: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        if size:
            dist.broadcast(buffer, 0)
        return buffer.numpy().tobytes()

    # --------------------------------------------------------------------------------------------- lost ranks

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Around whatever is collective: a failure because of another rank becomes one sentence.

        Args:
            what: is waited for, in words.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world == 1:
                raise
            lost = self._lost(PATIENCE_S)
            if lost is None and not isinstance(error, dist.DistError) and not speaks_of_peers(error):
                raise
            reason = lost or first_line(error)
            raise RankLost(
                f"rank {self.rank} of the learner waited for {what} and another rank is gone or silent "
                f"(learner.backend.collective_timeout_s={self._timeout_s:g}): {reason}"
            ) from error

    def _lost(self, patience_s: float) -> str | None:
        """Which of the ranks that this process started has ended, in words."""
        deadline = time.monotonic() + patience_s
        while self._children:
            for child in self._children:
                code = child.exit_code()
                if code is not None:
                    said = child.last_lines(1)
                    return f"{child.name} ended with {describe_exit(code)}" + (f": {said}" if said else "")
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return None

    def _watch(self) -> None:
        """In a thread of rank 0: a collective may not notice that its peer has died."""
        while not self._closing.wait(WATCH_S):
            lost = self._lost(0)
            if lost is not None and not self._closing.wait(GRACE_S):
                LOG.error("a rank of the learner is gone: %s", lost)
                print(f"error: a rank of the learner is gone: {lost}", file=sys.stderr, flush=True)
                os._exit(RankLost.exit_code)

    def close(self) -> None:
        """Leave the group, and end the ranks that this process started: they know, or something failed."""
        self._closing.set()
        deadline = time.monotonic() + (LEAVE_S if sys.exc_info()[0] is None else 0.0)
        while time.monotonic() < deadline and any(child.exit_code() is None for child in self._children):
            time.sleep(0.05)
        stop_all(self._children, 1.0)
        if self._lifeline is not None:
            self._lifeline.close()
        if self._joined:
            dist.destroy_process_group()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --------------------------------------------------------------------------------------------------- opening


def open_group(settings: BackendConfig, logs: Path) -> Group:
    """Join the other ranks, starting them where no launcher has. Call it before any thread runs.

    Args:
        settings: how many there are, where they compute, and how long they wait for each other.
        logs: folder for what started ranks print (`learner-rank1.out`).

    Raises:
        ConfigError: the environment is half set, or asks for a GPU that is not there.
        RankLost: not all of them came.
    """
    launched = given_world() is not None  # refuses half of an environment
    device = choose_device(settings.device)
    timeout = timedelta(seconds=settings.collective_timeout_s)
    children, lifeline = list[Child](), None
    if launched:
        rank, world, store = _from_launcher(timeout)
    elif settings.processes == 1:
        rank, world, store = 0, 1, STORES.HashStore()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # started ranks are on this machine
        rank, world = 0, settings.processes
        # Bound before the others start, so that the port is free and theirs from the beginning.
        store = STORES.TCPStore(
            "127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=timeout
        )
        lifeline = Lifeline()
        children = [_start(number, world, store.port, logs, lifeline) for number in range(1, world)]
    try:
        return Group(rank, world, device, store, settings.collective_timeout_s, children, lifeline)
    except BaseException:
        stop_all(children, 1.0)
        raise


def _from_launcher(timeout: timedelta) -> tuple[int, int, c10d.Store]:
    try:
        store, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    except (RuntimeError, ValueError) as error:
        raise RankLost(f"this rank of the learner found no others: {first_line(error)}") from error
    return rank, world, store


def _start(rank: int, world: int, port: int, logs: Path, lifeline: Lifeline) -> Child:
    """The same command as this process's, with another rank."""
    environment = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return spawn(
        f"rank {rank} of the learner",
        [sys.executable, *sys.orig_argv[1:]],
        log=logs / f"learner-rank{rank}.out",
        lifeline=lifeline,
        environment={**address, **{name: str(value) for name, value in environment.items()}},
    )


def as_tensor(data: bytes) -> Tensor:
    """`[len(data)]` uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def speaks_of_peers(error: BaseException) -> bool:
    """Whether a library's error is about another rank: gloo raises plain RuntimeErrors."""
    text = str(error).lower()
    words = ("gloo", "nccl", "connection", "timed out", "timeout", "broken pipe", "peer", "socket")
    return any(word in text for word in words)


def first_line(error: BaseException) -> str:
    """The first line of an error, shortened: libraries add their C++ stack."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
