"""Roles as processes that start in a blink: forked from one that has imported everything already.

    this process ─▶ fork server (imports torch once) ─▶ allocator, learner, actors, each a process of its own

They are what `run.py` starts, over real sockets; only the seconds of importing are saved, which is what a
measurement with dozens of starts would otherwise consist of.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from benchmarks.results import BenchmarkFailed
from common.processes import PR_SET_PDEATHSIG, describe_exit

PRELOADED = (
    "run",
    "learner.main",
    "learner.warmstart",
    "actors.main",
    "actors.demonstrate",
    "allocator.serve",
)
PATIENCE_S = 240.0
POLL_S = 0.02


class Roles:
    """Starts roles and ends those that are left; use it as a context manager.

    Args:
        logs: where `<name>.out` of each goes.
    """

    def __init__(self, logs: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._logs = logs
        self.running: dict[str, BaseProcess] = {}

    def __enter__(self) -> Roles:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str, words: Sequence[str]) -> None:
        """`run.py` with these words, under `name`."""
        process = self._context.Process(target=enter, args=(list(words), str(self._logs / f"{name}.out")))
        process.start()
        self.running[name] = process

    def kill(self, name: str) -> None:
        """`kill -9`, and wait until it is gone."""
        process = self.running.pop(name)
        process.kill()
        process.join()

    def wait(self, condition: Callable[[], bool], what: str, poll_s: float = POLL_S) -> None:
        """Until it holds.

        Raises:
            BenchmarkFailed: a role has failed, or it takes too long.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for name, process in self.running.items():
                if process.exitcode:
                    how = describe_exit(process.exitcode)
                    raise BenchmarkFailed(f"{name} ended with {how}, waiting for {what}: {self.said(name)}")
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"waited {PATIENCE_S:g} s for {what}: {self._logs} has what was said")
            time.sleep(poll_s)

    def join(self) -> None:
        """Until all have ended by themselves. Raises `BenchmarkFailed`."""
        self.wait(lambda: all(p.exitcode == 0 for p in self.running.values()), "the end of the run")
        self.running.clear()

    def said(self, name: str) -> str:
        """Its last line."""
        lines = (self._logs / f"{name}.out").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else "nothing said"


def enter(words: list[str], log: str) -> None:
    """In the new process: be a role. It dies with the fork server, which dies with whoever began it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import run

    sys.exit(run.main(words))
