"""The tracker: whatever MLflow does, metrics are read, kept and sent later. MLflow itself is in test_tracking."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import ProtocolError
from common.messages import Bye, Metrics
from common.spool import Spool
from common.tracker import BUSY_S, INTERVAL_S, MAX_PENDING, Stop, Tracker
from common.tracking import Row


class FakeSink:
    """MLflow as the test wants it: working, failing, or hanging until it is let go."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.batches: list[int] = []
        self.status = ""
        self.opened = 0
        self.down = False
        self.refused = 0
        self.go = threading.Event()
        self.go.set()

    def _answer(self) -> None:
        self.go.wait(30)
        if self.down:
            raise ConnectionError("connection refused")

    def open(self) -> None:
        self._answer()
        self.opened += 1

    def log(self, rows: list[Row]) -> int:
        self._answer()
        self.batches.append(len(rows))
        self.rows += rows
        return self.refused

    def finish(self, status: str) -> None:
        self._answer()
        self.status = status


class Bench:
    """A tracker with a fake sink, stepped by hand: one `step` is a tick and the answer to it."""

    def __init__(self, folder: Path) -> None:
        self.sink = FakeSink()
        self.path = folder / "spool.jsonl"
        self.tracker = Tracker(self.sink, Spool(self.path))
        self.now = 0.0

    def take(self, role: str = "learner", peer: str = "learner", step: int = 1, **values: float) -> None:
        self.tracker.take(Metrics(role=role, peer=peer, step=step, values=values), 1000)

    def tick(self, passed: float = 0.0) -> None:
        self.now += passed
        self.tracker.tick(self.now)

    def step(self, passed: float = INTERVAL_S) -> None:
        self.tick(passed)
        wait_until(lambda: not self.tracker._worker._results.empty() or not self.tracker._worker.busy)
        self.tick()
        wait_until(lambda: not self.tracker._worker._results.empty() or not self.tracker._worker.busy)
        self.tick()

    def names(self) -> list[str]:
        return [row.name for row in self.sink.rows if not row.name.startswith("tracker/")]

    def spooled(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, "the worker did not answer"
        time.sleep(0.001)


@pytest.fixture(name="bench")
def new_bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_metrics_of_several_roles_are_told_apart(bench: Bench) -> None:
    bench.take("learner", "learner", 3, loss=0.5)
    bench.take("actor", "actor-1", 3, loss=0.25)
    bench.take("actor", "actor-2", 3, **{"reward//mean@1": 0.125})
    bench.step()
    assert bench.sink.rows == [
        Row("learner/loss", 0.5, 3, 1000),
        Row("actor/actor-1/loss", 0.25, 3, 1000),
        Row("actor/actor-2/reward/mean_1", 0.125, 3, 1000),
    ]


def test_a_whole_interval_is_one_batch(bench: Bench) -> None:
    bench.take(loss=1.0)
    bench.step()
    for step in range(100):
        bench.take(step=step, loss=1.0, reward=2.0)
        bench.tick(INTERVAL_S / 200)
    bench.step()
    assert bench.sink.batches == [1, 200]


def test_numbers_that_are_not_finite_are_dropped_and_their_count_is_recorded(bench: Bench) -> None:
    bench.take(loss=math.nan, low=-math.inf, good=1.0)
    bench.step()
    assert bench.names() == ["learner/good"]
    assert Row("tracker/nonfinite_values", 2, 2, 0) in bench.sink.rows


def test_messages_that_are_none_are_counted_and_said_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for second in range(30):
        bench.tracker.reject(ProtocolError("not a message"), float(second))
    bench.step()
    assert Row("tracker/rejected_messages", 30, 30, 0) in bench.sink.rows
    assert caplog.text.count("not a message") == 1


def test_rows_that_mlflow_refuses_for_good_are_counted(bench: Bench) -> None:
    bench.sink.refused = 1
    bench.take(loss=1.0)
    bench.step()
    bench.sink.refused = 0
    bench.step()
    assert bench.tracker.counts["refused_metrics"] == 1
    assert Row("tracker/refused_metrics", 1, 1, 0) in bench.sink.rows


def test_while_mlflow_fails_everything_is_spooled_and_sent_when_it_answers_again(bench: Bench) -> None:
    bench.sink.down = True
    for step in range(20):
        bench.take(step=step, loss=1.0)
        bench.step()
    assert bench.sink.rows == []
    assert bench.spooled() == 20
    bench.sink.down = False
    for _ in range(3):
        bench.step(passed=60)
    assert sorted(row.step for row in bench.sink.rows if row.name == "learner/loss") == list(range(20))
    assert bench.spooled() == 0


def test_a_failure_in_mid_run_loses_no_row_of_the_batch_that_failed(bench: Bench) -> None:
    bench.take(step=0, loss=1.0)
    bench.step()
    bench.sink.down = True
    bench.take(step=1, loss=1.0)
    bench.step()
    bench.take(step=2, loss=1.0)
    bench.step()
    bench.sink.down = False
    for _ in range(3):
        bench.step(passed=60)
    assert sorted(row.step for row in bench.sink.rows if row.name == "learner/loss") == [0, 1, 2]


def test_retries_come_at_growing_intervals_and_warnings_once_a_minute(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.sink.down = True
    calls = []
    real_open = bench.sink.open

    def counted() -> None:
        calls.append(bench.now)
        real_open()

    bench.sink.open = counted  # type: ignore[method-assign]
    for _ in range(600):
        bench.step(passed=1.0)
    assert 10 <= len(calls) <= 20
    assert caplog.text.count("MLflow failed") <= 11


def test_while_mlflow_hangs_the_reader_goes_on_and_memory_stays_bounded(bench: Bench) -> None:
    bench.step()
    bench.sink.go.clear()
    bench.take(step=0, loss=1.0)
    bench.tick(INTERVAL_S)
    began = time.monotonic()
    for step in range(1, 100):
        bench.take(step=step, loss=1.0)
        bench.tick(1.0)
    assert time.monotonic() - began < 2
    assert bench.spooled() >= 99 - BUSY_S
    assert len(bench.tracker._pending) < MAX_PENDING
    bench.sink.go.set()
    for _ in range(4):
        bench.step(passed=1.0)
    assert sorted(row.step for row in bench.sink.rows if row.name == "learner/loss") == list(range(100))


def test_rows_that_an_earlier_tracker_left_are_sent_by_the_next(tmp_path: Path) -> None:
    Spool(tmp_path / "spool.jsonl").append([Row("learner/loss", 1.0, step, 0) for step in range(2500)])
    bench = Bench(tmp_path)
    for _ in range(5):
        bench.step()
    assert len(bench.sink.rows) == 2500
    assert max(bench.sink.batches) <= 1000
    assert bench.spooled() == 0


def test_finishing_sends_what_is_left_and_closes_the_run(bench: Bench) -> None:
    bench.take(loss=1.0)
    bench.tracker.finish("FINISHED", time.monotonic)
    assert bench.names() == ["learner/loss"]
    assert bench.sink.status == "FINISHED"
    assert bench.spooled() == 0


def test_finishing_a_run_without_any_metrics_opens_and_closes_it(bench: Bench) -> None:
    bench.tracker.finish("FAILED", time.monotonic)
    assert (bench.sink.opened, bench.sink.status) == (1, "FAILED")


def test_finishing_while_mlflow_is_down_ends_at_once_and_keeps_the_rows(bench: Bench) -> None:
    bench.sink.down = True
    bench.take(loss=1.0)
    began = time.monotonic()
    bench.tracker.finish("FINISHED", time.monotonic)
    assert time.monotonic() - began < 2
    assert bench.spooled() == 1


def test_finishing_while_mlflow_hangs_ends_in_time_and_keeps_the_rows_it_may_not_have(bench: Bench) -> None:
    bench.step()
    bench.sink.go.clear()
    bench.take(step=1, loss=1.0)
    bench.tick(INTERVAL_S)
    bench.take(step=2, loss=1.0)
    clock = iter(range(10_000))
    bench.tracker.finish("FINISHED", lambda: float(next(clock)))
    assert bench.spooled() == 2
    bench.sink.go.set()


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (6, "FAILED"), (130, "KILLED")])
def test_how_the_run_ended_is_what_mlflow_is_told(code: int, status: str) -> None:
    stop = Stop()
    assert not stop.asked
    stop.on_bye(Bye(code, "why"))
    stop.on_signal()
    assert stop.asked and stop.status == status
    assert stop.signals == 1, "a goodbye and then one signal is no wish to skip the drain"
