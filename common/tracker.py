"""role=tracker: the one process that talks to MLflow, so that nobody else ever waits for it.

    roles ──PUSH──▶ reader (main thread) ──batch──▶ MLflow (own thread)
                        │    ▲                          │
                        ▼    └──────── done / failed ───┘
                   spool.jsonl

    reader   consumes metrics, produces one batch each second; waits for nothing longer than POLL_S
    MLflow   consumes batches, one at a time; waits for the server; unblocked by it alone

While the server is slow or down, the reader goes on reading and puts rows into the spool; they are sent when
the server answers again, in this process or in the next tracker of the run. SIGTERM or `Bye` drains: what the
server does not take within DRAIN_S stays in the spool.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from common.codec import decode
from common.config import Config, to_plain
from common.errors import ProtocolError
from common.logs import Repeats, fields, setup_logs
from common.messages import Bye, Metrics, ToTracker
from common.rundir import RunDir
from common.sockets import SocketFactory, bound_endpoint
from common.spool import FILE_NAME, Spool
from common.tracking import (
    MAX_METRICS_PER_BATCH,
    MlflowRun,
    Row,
    clean_name,
    destination,
    flat_params,
)

LOG = logging.getLogger("treeward.tracker")

POLL_S = 0.1
INTERVAL_S = 1.0
"""One request a second: each costs MLflow some 10 ms and more, however few metrics it holds."""
BUSY_S = 5.0
"""A request that takes longer than this sends what arrives meanwhile to the spool."""
MAX_PENDING = 50_000
MAX_READ = 1_000
"""Messages read before the batches are looked after again."""
RETRY_MIN_S, RETRY_MAX_S = 1.0, 60.0
DRAIN_S = 20.0
KILLED_BY = 128
"""Exit codes from here on say that a signal ended the run."""
QUIET_S = 0.3
"""After the order to stop: the last metrics of roles that stop too arrive within this, each."""


class Sink(Protocol):
    """What the tracker needs of MLflow; each call may block or raise."""

    def open(self) -> None: ...

    def log(self, rows: list[Row]) -> int: ...

    def finish(self, status: str) -> None: ...


class MlflowSink:
    """An MLflow run with what it is opened with."""

    def __init__(self, config: Config, rundir: RunDir) -> None:
        self._run = MlflowRun(destination(config, rundir.id, rundir.tracking))
        self._params = flat_params(config)
        file = rundir.config_file
        self._text = (
            file.read_text(encoding="utf-8") if file.is_file() else json.dumps(to_plain(config), indent=2)
        )

    def open(self) -> None:
        run_id = self._run.open(self._params, self._text)
        LOG.info("recording in MLflow run %s", run_id, extra=fields("tracking_opened", mlflow_run=run_id))

    def log(self, rows: list[Row]) -> int:
        return self._run.log(rows)

    def finish(self, status: str) -> None:
        self._run.finish(status)


@dataclass(frozen=True, slots=True)
class Done:
    """How a call ended: its value, or the error."""

    value: Any = None
    error: Exception | None = None


class Worker:
    """A daemon thread that runs one call at a time. A call that never returns blocks no exit."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._run, name="mlflow", daemon=True).start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                self._results.put(Done(value=call()))
            except Exception as error:  # noqa: BLE001 - mlflow raises what its libraries raise
                self._results.put(Done(error=error))

    def start(self, call: Callable[[], Any]) -> None:
        self.busy = True
        self._calls.put(call)

    def poll(self) -> Done | None:
        """The end of the running call, once."""
        try:
            done = self._results.get_nowait()
        except queue.Empty:
            return None
        self.busy = False
        return done


class Tracker:
    """Metrics in, batches out. Time is an argument; the only thread it starts is the worker's."""

    def __init__(self, sink: Sink, spool: Spool) -> None:
        self._sink, self._spool, self._worker = sink, spool, Worker()
        self._pending: list[Row] = []
        self._sent: list[Row] = []
        """Rows of the running call that are in memory only."""
        self._on_success: Callable[[], None] = self._opened
        self._open, self._finished = False, False
        self._busy_since, self._next_batch = 0.0, 0.0
        self._retry_s, self._retry_at = RETRY_MIN_S, 0.0
        self._repeats = Repeats(every_s=60.0)
        self.counts = {"nonfinite_values": 0, "refused_metrics": 0, "rejected_messages": 0, "spooled_rows": 0}
        """What went wrong so far; recorded as metrics of the tracker itself."""
        self._reported = dict(self.counts)

    def take(self, message: Metrics, when_ms: int) -> None:
        """Rows of one message, under `role/name`, or `role/peer/name` where there are several of a role."""
        place = message.role if message.peer == message.role else f"{message.role}/{message.peer}"
        for name, value in message.values.items():
            if math.isfinite(value):
                self._pending.append(Row(clean_name(f"{place}/{name}"), value, message.step, when_ms))
            else:
                self.counts["nonfinite_values"] += 1

    def tick(self, now: float, when_ms: int = 0) -> None:
        """See how the running call ended, and start the next one when it is time."""
        done = self._worker.poll()
        if done is not None:
            self._ended(done, now)
        if self._worker.busy:
            if now - self._busy_since > BUSY_S or len(self._pending) > MAX_PENDING:
                self._spool_pending()
        elif now < self._retry_at:
            self._spool_pending()
        elif not self._open:
            self._start(now, self._sink.open, self._opened)
        elif now >= self._next_batch and (self._pending or self.counts != self._reported):
            self._next_batch = now + INTERVAL_S
            self._send_pending(now, when_ms)
        elif self._spool:
            rows = self._spool.peek(MAX_METRICS_PER_BATCH)
            self._start(now, lambda: self._sink.log(rows), self._spool.taken)

    def _send_pending(self, now: float, when_ms: int) -> None:
        if self.counts != self._reported:
            self._reported = dict(self.counts)
            step = sum(self.counts.values())
            self._pending += [
                Row(f"tracker/{name}", count, step, when_ms) for name, count in self.counts.items()
            ]
        rows = self._sent = self._pending
        self._pending = []
        self._start(now, lambda: self._sink.log(rows), self._sent.clear)

    def _start(self, now: float, call: Callable[[], Any], on_success: Callable[[], None]) -> None:
        self._busy_since, self._on_success = now, on_success
        self._worker.start(call)

    def _opened(self) -> None:
        self._open = True

    def _ended(self, done: Done, now: float) -> None:
        if done.error is None:
            self.counts["refused_metrics"] += done.value or 0
            self._retry_s = RETRY_MIN_S
            self._on_success()
            return
        self._retry_at = now + self._retry_s
        self._retry_s = min(RETRY_MAX_S, 2 * self._retry_s)
        self._warn("tracking_failed", f"MLflow failed, metrics wait in the spool: {done.error}", now)
        self._pending = self._sent + self._pending
        self._sent = []
        self._spool_pending()

    def _spool_pending(self) -> None:
        if self._pending:
            self.counts["spooled_rows"] += len(self._pending)
            self._spool.append(self._pending)
            self._pending = []

    def reject(self, error: ProtocolError, now: float) -> None:
        """Count a message that was none."""
        self.counts["rejected_messages"] += 1
        self._warn("message_rejected", f"dropped a message: {error}", now)

    def _warn(self, event: str, text: str, now: float) -> None:
        held = self._repeats.allow(event, now)
        if held is not None:
            more = f" (and {held} more since the last such line)" if held else ""
            LOG.warning("%s%s", text, more, extra=fields(event, held=held))

    @property
    def idle(self) -> bool:
        """Nothing left that MLflow would take now."""
        return not (self._worker.busy or self._pending or self._spool)

    def finish(self, status: str, clock: Callable[[], float]) -> None:
        """Send what is left and close the run, within DRAIN_S; the rest goes to the spool."""
        deadline = clock() + DRAIN_S
        self._retry_at = self._next_batch = 0.0
        if self._worker.busy:
            self._spool_pending()  # whoever loses patience and kills us now loses nothing
        while clock() < deadline and not (self.idle and self._finished):
            self.tick(clock(), _wall_ms())
            if self._retry_at > clock() and not self._worker.busy:
                break  # down: waiting longer would not change it
            if self._open and self.idle and not self._finished:
                self._start(clock(), lambda: self._sink.finish(status), self._closed)
            time.sleep(0.01)
        self._pending = self._sent + self._pending
        self._spool_pending()
        if self._spool:
            LOG.warning("metrics are left in the spool; role=tracker on this run sends them later")

    def _closed(self) -> None:
        self._finished = True


class Stop:
    """Set by SIGTERM, SIGINT or `Bye`; a second signal skips the drain."""

    def __init__(self) -> None:
        self.signals = 0
        self.bye: Bye | None = None

    @property
    def asked(self) -> bool:
        return self.signals > 0 or self.bye is not None

    @property
    def status(self) -> str:
        """MLflow's word for how the run ended."""
        code = self.bye.code if self.bye is not None else 0
        return "FINISHED" if code == 0 else "KILLED" if code >= KILLED_BY else "FAILED"

    def on_signal(self, *_: object) -> None:
        self.signals += 1

    def on_bye(self, bye: Bye) -> None:
        self.bye = bye


def run_tracker(config: Config, rundir: RunDir) -> int:
    """Record the run until SIGTERM, SIGINT or `Bye`. Returns the exit code: 0, whatever MLflow does.

    Raises:
        ConfigError, SecurityError: the endpoint cannot be bound.
        StorageError: another tracker records this run.
    """
    setup_logs("tracker", rundir.log_file("tracker"), run=rundir.id)
    if not config.tracking.enabled:
        LOG.info("tracking.enabled=false: nothing to record")
        return 0
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.on_signal)
    context = zmq.Context()
    with rundir.lock("tracker"):
        pull = SocketFactory(config.security, context).pull(config.cluster.tracker)
        rundir.publish_endpoint("tracker", bound_endpoint(pull))
        tracker = Tracker(MlflowSink(config, rundir), Spool(rundir.tracking / FILE_NAME))
        while not stop.asked:
            _read(pull, tracker, stop, POLL_S)
            tracker.tick(time.monotonic(), _wall_ms())
        deadline = time.monotonic() + DRAIN_S
        while _clock(stop) < deadline and _read(pull, tracker, stop, QUIET_S):
            tracker.tick(time.monotonic(), _wall_ms())
        tracker.finish(stop.status, lambda: _clock(stop))
    context.destroy(linger=0)
    return 0


def _clock(stop: Stop) -> float:
    """Monotonic time, and the end of time once a second signal came."""
    return time.monotonic() if stop.signals < 2 else math.inf


def _wall_ms() -> int:
    return int(1000 * time.time())


def _read(pull: zmq.Socket[bytes], tracker: Tracker, stop: Stop, wait_s: float) -> int:
    """Take what has arrived, waiting at most `wait_s` for the first message. Returns how many there were."""
    count = 0
    while count < MAX_READ and pull.poll(0 if count else int(1000 * wait_s)):
        count += 1
        try:
            message = decode(pull.recv_multipart(), ToTracker).message
        except ProtocolError as error:
            tracker.reject(error, time.monotonic())
            continue
        if isinstance(message, Bye):
            stop.on_bye(message)
        else:
            tracker.take(message, _wall_ms())
    return count
