"""The frozen latency model has the mean and the tail it states, and its fit finds what was put in."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from benchmarks.latencies import FROZEN, Latency, NoTail, fit, frozen, main
from common.errors import StorageError
from common.journal import JournalWriter
from common.messages import Expanded, Starting
from common.nouns import LeaseId, Turn, Version


def test_a_turn_takes_one_mean_turn_on_average() -> None:
    model = frozen()
    draws = [model.draw(seed) for seed in range(60_000)]
    error = statistics.stdev(draws) / len(draws) ** 0.5
    assert statistics.fmean(draws) == pytest.approx(1.0, abs=4 * error) and error < 0.01


def test_the_mean_of_a_step_is_that_of_a_pareto_variable_that_is_cut() -> None:
    """Against the integral of P(X > t), by the trapezoidal rule."""
    model = Latency(sigma=0.5, quick=0.1, slow_share=1.0, slow_from=1.5, slow_alpha=1.5, slow_most=60.0)
    steps, step = 200_000, 58.5 / 200_000
    tail = [(1.5 / (1.5 + i * step)) ** 1.5 for i in range(steps + 1)]
    assert model.step_mean == pytest.approx(1.5 + step * (math.fsum(tail) - (tail[0] + tail[-1]) / 2))


def test_the_tail_is_heavy_and_ends_at_the_timeout() -> None:
    model = frozen()
    draws = sorted(model.draw(seed) for seed in range(60_000))
    assert draws[len(draws) * 99 // 100] > 5 * draws[len(draws) // 2]
    assert 40 < draws[-1] < model.slow_most + 20 * (1 - model.step_mean)
    slow = sum(1 for draw in draws if draw > 10) / len(draws)
    assert slow == pytest.approx(model.slow_share * (model.slow_from / 10) ** model.slow_alpha, rel=0.25)


def test_without_a_tail_every_turn_takes_as_long() -> None:
    assert {NoTail().draw(seed) for seed in range(100)} == {1.0}


def test_a_fit_finds_the_spread_of_the_turns_in_a_journal(tmp_path: Path) -> None:
    model = Latency(sigma=0.6, quick=0.0, slow_share=0.0, slow_from=1.0, slow_alpha=2.0, slow_most=2.0)
    now = 0.0
    with JournalWriter(tmp_path / "journal.tw") as journal:
        for number in range(500):
            lease = LeaseId(number % 7, number, 0)
            journal.append("input", peer="a/0", now=now, message=Starting(lease, Version(0, 0)))
            for offset in range(4):
                now += model.draw(10 * number + offset)
                journal.append("input", peer="a/0", now=now, message=Expanded(lease, offset, Turn()))
    found = fit(tmp_path / "journal.tw")
    assert found["turns"] == 2_000 and found["sigma"] == pytest.approx(0.6, abs=0.03)
    assert found["mean_s"] == pytest.approx(1.0, abs=0.05)


def test_a_run_without_turns_and_a_broken_model_are_refused(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.tw") as journal:
        journal.append("start", run="r")
    with pytest.raises(StorageError, match="holds no turns"):
        fit(tmp_path / "journal.tw")
    (tmp_path / "latency.json").write_text('{"model": {"sigma": 1}}')
    with pytest.raises(StorageError, match="restore the file"):
        frozen(tmp_path / "latency.json")
    with pytest.raises(StorageError, match="name one run directory"):
        main([])


def test_the_committed_model_states_what_was_measured_and_what_was_not() -> None:
    text = FROZEN.read_text(encoding="utf-8")
    assert '"fitted"' in text and '"stated"' in text
