"""The thread that owns the model.

post ─▶ inbox ─▶ take commands ─▶ batch.admit ─▶ batch.step ─▶ answers to their event loops
          ▲                                                        │
          └───────────────────── the next requests ◀───────────────┘

consumes      commands posted from any thread
produces      answers, delivered to the event loop of each caller
waits for     the inbox, only while the batch is idle
unblocked by  `post`; `Stop` or an exception ends it, and then every caller, present or future, is
              told so
"""

from __future__ import annotations

import queue
import threading
import time

import torch

from actors.engines.batch import Batch, BatchOptions, Totals
from actors.engines.jobs import Abort, Command, Job, Release, Stop, Swap, deliver
from common.errors import EngineError
from common.nouns import Version

GATHER_S = 2e-3
"""Longest wait for more requests before a step that would start a fresh batch: about one forward pass of
a small model, which a batch too small would waste."""
QUIET_S = 3e-4
"""A gap in arrivals as long as this ends the wait: the event loop has nothing more to send."""


class Worker(threading.Thread):
    """Only `post`, `version` and `totals` are for other threads."""

    def __init__(self, options: BatchOptions, threads: int) -> None:
        # A daemon: a process whose main thread failed must be able to end without `close`.
        super().__init__(name="torch-engine", daemon=True)
        self._options, self._threads = options, threads
        self._batch = Batch(options)
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._ending = threading.Lock()  # orders `post` and the end of the thread
        self._cause: BaseException | None = None
        self._stopping = False

    @property
    def version(self) -> Version | None:
        """Weights in use."""
        return self._batch.version

    @property
    def totals(self) -> Totals:
        """Counted since the start."""
        return self._batch.totals

    def post(self, command: Command) -> None:
        """Hand a command over; raises `EngineError` once the thread has ended."""
        with self._ending:
            if self._cause is not None:
                raise _stopped(self._cause)
            self._inbox.put(command)

    def run(self) -> None:
        """Work until `Stop`; whatever ends the loop, nobody is left waiting."""
        torch.set_num_threads(self._threads)
        cause: BaseException = EngineError("it was closed")
        try:
            with torch.inference_mode():
                self._loop()
        except BaseException as error:  # noqa: BLE001 - the cause reaches every caller
            cause = error
        with self._ending:
            self._cause = cause
        self._fail_everyone(cause)

    def _loop(self) -> None:
        batch = self._batch
        while True:
            self._take_commands()
            if self._stopping:
                return
            batch.admit()
            if batch.active:
                began = time.perf_counter()
                batch.step()
                batch.totals.busy_s += time.perf_counter() - began
            self._flush()

    def _take_commands(self) -> None:
        if self._batch.idle:
            self._handle(self._inbox.get())
        while not self._inbox.empty():
            self._handle(self._inbox.get_nowait())
        if not self._batch.active and not self._options.deterministic:
            self._gather()

    def _gather(self) -> None:
        """A batch that starts afresh waits a moment for those who are about to ask as well."""
        waiting, sessions = self._batch.waiting, self._batch.cache.sessions
        deadline = time.perf_counter() + GATHER_S
        while waiting and len(waiting) < self._options.max_batch and not self._stopping:
            if 0 < sessions <= len(waiting):
                return  # every known session is here
            left = min(QUIET_S, deadline - time.perf_counter())
            if left <= 0:
                return
            try:
                self._handle(self._inbox.get(timeout=left))
            except queue.Empty:
                return

    def _handle(self, command: Command) -> None:
        match command:
            case Job() | Swap():
                self._batch.enqueue(command)
            case Release(session):
                self._batch.release(session)
            case Abort(session, turn):
                self._batch.abort(session, turn)
            case Stop():
                self._stopping = True

    def _flush(self) -> None:
        if self._batch.answers:
            deliver(self._batch.answers)
            self._batch.answers = []

    def _fail_everyone(self, cause: BaseException) -> None:
        left: list[Command] = [*self._batch.active, *self._batch.waiting]
        while not self._inbox.empty():
            left.append(self._inbox.get_nowait())
        pending = [command.reply for command in left if isinstance(command, (Job, Swap))]
        self._batch.answers += [(reply, _stopped(cause)) for reply in pending]
        self._flush()


def _stopped(cause: BaseException) -> EngineError:
    error = EngineError(f"the generation engine has stopped: {cause}")
    error.__cause__ = cause
    return error
