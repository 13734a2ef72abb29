"""Rates, waits and bytes of a run whose journals are written by hand, so that every figure is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.accounts import Account, Window, account, read_accounts, tokens_not_accepted
from benchmarks.results import BenchmarkFailed
from benchmarks.ring import null_control, sensitivity_control
from benchmarks.ring_figures import HEADLINE, figures, spread
from common.journal import JournalWriter, Record
from common.rundir import RunDir

ALLOCATOR, WEIGHTS, TRACKER = (f"tcp://127.0.0.1:{port}" for port in (5, 6, 8))


def usage(
    now: float, seconds: dict[str, float], traffic: dict[str, list[int]], **more: Any
) -> dict[str, Any]:
    return {"now": now, "cpu_s": now / 10, "seconds": seconds, "traffic": traffic, **more}


def learner_journal(path: Path, steps: int = 3) -> None:
    """An update each 10 s from t = 10 on: 4 s of training, 5 s of waiting; 400 tokens trained, 100 context."""
    with JournalWriter(path) as journal:
        journal.append("start", incarnation="l/0", lineage=0, step=0)
        for step in range(1, steps + 1):
            journal.append(
                "consumed", trees=[step], lineage=0, step=step, tokens_trained=400, tokens_context=100
            )
            seconds = {"train_s": 4.0 * step, "wait_trees_s": 5.0 * step, "publish_s": 0.5 * step}
            traffic = {
                ALLOCATOR: [0, 1000 * step],
                WEIGHTS: [2000 * step, 10 * step],
                TRACKER: [50 * step, 0],
            }
            journal.append("usage", **usage(10.0 * step, seconds, traffic, step=step))


def actor_journal(path: Path, waited: float) -> None:
    """`waited` of each second without a lease; a quarter of it spent generating."""
    with JournalWriter(path) as journal:
        journal.append("start", peer="a", incarnation="0")
        for now in range(0, 41, 4):
            seconds = {"leases": waited * now, "weights": 0.05 * now, "work": (0.95 - waited) * now}
            traffic = {ALLOCATOR: [60 * now, 30 * now], WEIGHTS: [now, 100 * now], TRACKER: [5 * now, 0]}
            journal.append("usage", **usage(float(now), seconds, traffic, engine_s=0.25 * now))


def allocator_journal(path: Path) -> None:
    """A turn of 7 tokens each second from t = 1 to 40; the first lease at t = 1."""
    with JournalWriter(path) as journal:
        journal.append("start", run="r", sender="allocator/0", now=0.0)
        journal.append("tick", now=1.0)
        journal.append("lease_issued", tree=0, number=0, epoch=0, peer="a/0")
        for now in range(1, 41):
            journal.append("input", peer="a/0", now=float(now), message={})
            journal.append("turn_accepted", tree=0, number=now, epoch=0, offset=0, tokens=7)
            if now % 2 == 0:
                journal.append(
                    "lease_ended", tree=0, number=now, epoch=0, kind="finished", turns=1, reason=""
                )
            if now % 5 == 0:
                book = {"waiting": 0.8 * now, "working": 0.2 * now}
                waited = {"outcomes": 0.6 * now, "work_ahead": 0.2 * now}
                journal.append("usage", **usage(float(now), book, {ALLOCATOR: [0, 120 * now]}, waited=waited))
        journal.append("end", in_flight_trees=[], in_flight_leases=[])


@pytest.fixture(name="run")
def hand_made_run(tmp_path: Path) -> Path:
    """The steady stretch is from t = 10 to t = 30."""
    rundir = RunDir.create(tmp_path, "run")
    learner_journal(rundir.learner_journal)
    allocator_journal(rundir.allocator_journal)
    for name, waited in (("a", 0.1), ("b", 0.3)):
        actor_journal(rundir.actor_dir(name) / "journal.tw", waited)
    for role, endpoint in (("allocator", ALLOCATOR), ("weights", WEIGHTS), ("tracker", TRACKER)):
        rundir.publish_endpoint(role, endpoint)
    return rundir.path


def test_the_headline_of_a_run_is_what_its_journals_say(run: Path) -> None:
    found = figures(read_accounts(run))
    assert found["rollout_tokens_per_s"] == pytest.approx(7.0), "20 turns in 20 s"
    assert found["learner_tokens_per_s"] == pytest.approx(100.0), "800 tokens in 8 s of training"
    assert found["learner_tokens_per_wall_s"] == pytest.approx(40.0)
    assert found["actor_wait"] == pytest.approx(0.25), "0.1 and 0.3 for leases, 0.05 each for weights"
    assert found["learner_wait"] == pytest.approx(0.5)
    assert set(HEADLINE) <= set(found)


def test_only_the_steady_stretch_counts_and_what_came_before_it_is_said(run: Path) -> None:
    found = figures(read_accounts(run))
    assert (found["window_s"], found["ramp_up_s"], found["updates"]) == (20.0, 9.0, 2)
    sampled = {"sampled": 140, "accepted": 140, "crossed": 0, "discarded": 0}
    assert found["tokens"] == {**sampled, "trained": 800, "context": 200, "turns": 20, "episodes": 10}


def test_revoked_work_counts_as_sampled_once_however_often_word_of_it_came() -> None:
    lease = {"tree": 0, "number": 1, "epoch": 0}
    turns = [
        {"type": "Expanded", "lease": lease, "offset": offset, "turn": {"action": bytes(4 * tokens)}}
        for offset, tokens in ((0, 7), (1, 5))
    ]
    failed = {"type": "Failed", "lease": lease, "reason": "", "retry": False, "discarded_tokens": 3}
    records = [Record("input", {"message": message}, 0) for message in (*turns, failed, *turns, failed)]
    assert tokens_not_accepted(records, {(0, 1, 0, 0)}) == (5, 3), "the first turn was accepted"


def test_bytes_are_counted_once_at_their_receiver_and_metrics_at_their_sender(run: Path) -> None:
    wire = figures(read_accounts(run))["wire"]
    assert wire["to_allocator"] == pytest.approx(120 * 20)
    assert wire["to_actors"] == pytest.approx(2 * 30 * 20)
    assert wire["trees_to_learner"] == pytest.approx(2000)
    assert wire["weights"] == pytest.approx(2 * 100 * 20 + 20), (
        "chunks to both actors, requests to the learner"
    )
    assert wire["metrics"] == pytest.approx(2 * 5 * 20 + 100)
    assert wire["hints"] == 0
    assert wire["total"] == pytest.approx(2400 + 1200 + 2000 + 4020 + 300)
    assert wire["unmatched_share"] == pytest.approx(0.0), "both actors' 60 a second arrive"
    assert figures(read_accounts(run))["wire_bytes_per_token"] == pytest.approx(9920 / 800)


def test_the_shares_of_a_process_add_up_to_its_time(run: Path) -> None:
    found = figures(read_accounts(run))
    for shares in found["actors"].values():
        assert sum(value for name, value in shares.items() if name != "cpu") == pytest.approx(1.0)
    learner = {name: value for name, value in found["learner"].items() if name != "cpu"}
    assert sum(learner.values()) == pytest.approx(1.0)
    assert learner["other"] == pytest.approx(0.05)
    allocator = found["allocator"]
    assert allocator["work"] + allocator["idle"] == pytest.approx(1.0)
    assert allocator["idle_outcomes"] + allocator["idle_work_ahead"] == pytest.approx(allocator["idle"])
    assert allocator["cpu"] == pytest.approx(0.1)


def test_a_total_between_two_records_lies_on_the_line_between_them_and_stays_within_the_record() -> None:
    book = Account("a", tuple(usage(now, {"work": total}, {}) for now, total in ((0.0, 0.0), (10.0, 8.0))))
    assert book.seconds(Window(2.5, 5.0), "work") == pytest.approx(2.0)
    assert book.seconds(Window(-5.0, 50.0), "work") == pytest.approx(8.0)
    assert book.seconds(Window(0.0, 10.0), "never") == 0.0


def test_a_process_that_was_restarted_is_refused() -> None:
    """Its totals began again at 0: differences would be wrong without anybody noticing."""
    starts = [Record("start", {}, 0), Record("start", {}, 9)]
    with pytest.raises(BenchmarkFailed, match="actor-0 was restarted 1 times"):
        account("actor-0", starts)


def test_a_run_too_short_to_have_a_steady_stretch_is_refused(run: Path) -> None:
    (run / "learner" / "journal.tw").unlink()
    learner_journal(run / "learner" / "journal.tw", steps=1)
    with pytest.raises(BenchmarkFailed, match="train longer"):
        read_accounts(run)


def test_noise_is_the_range_of_equal_runs_over_their_mean() -> None:
    assert spread([{"x": 90.0}, {"x": 110.0}, {"x": 100.0}], "x") == pytest.approx(0.2)
    assert spread([{"x": 0.0}, {"x": 0.0}], "x") == 0.0
    assert null_control([dict.fromkeys(HEADLINE, 1.0)]) == {}, "one run says nothing about noise"


def test_the_sensitivity_control_says_whether_waiting_rises_without_slack() -> None:
    runs = [{"run": "repeat-0", "actor_wait": 0.1}, {"run": "synchronous", "actor_wait": 0.4}]
    assert sensitivity_control({"actor_wait": 0.1}, runs)["rises"]
    assert not sensitivity_control({"actor_wait": 0.5}, runs)["rises"]
    assert sensitivity_control({"actor_wait": 0.1}, runs[:1]) == {}
