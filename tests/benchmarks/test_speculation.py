"""The command: what it plans, what it says last, and that a small cell goes through all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results, speculation
from benchmarks.speculation import DEFAULTS, RATIOS, Task, headline, headline_of_ratios, plan, ratios
from benchmarks.speculation_arms import Cell


def test_every_tier_measures_the_hard_cell_of_the_headline_and_every_rule_its_default() -> None:
    for full in (False, True):
        tasks = plan(full, [0, 1])
        hard = [t for t in tasks if (t.cell.slots, t.cell.ratio, t.cell.tail) == (1_000, 0.125, True)]
        arms = {arm for task in hard for arm in task.arms}
        assert {("uucb", 0), ("uucb", DEFAULTS["uucb"])} <= arms
        assert len({(task.name, task.seed) for task in tasks}) == len(tasks)


def test_the_full_tier_covers_slots_ratios_tails_and_all_bounds() -> None:
    tasks = plan(True, [0])
    cells = {(task.cell.slots, task.cell.ratio, task.cell.tail) for task in tasks}
    assert {(16, ratio, tail) for ratio in RATIOS for tail in (True, False)} <= cells
    assert {1_000, 10_000} <= {slots for slots, _, _ in cells}
    bounds = {d for task in tasks for rule, d in task.arms if rule == "uucb"}
    assert {0, 1, 2, 4, 8, 16, 32, 64} <= bounds
    assert {"uucb", "trace", "random"} == {rule for task in tasks for rule, _ in task.arms}


def test_the_ratios_alone_are_those_of_the_full_tier_and_have_a_headline_of_their_own() -> None:
    alone = list(ratios([0]))
    assert [task for task in plan(True, [0]) if task in alone] == alone
    assert {task.cell.ratio for task in alone} == set(RATIOS) and {task.cell.slots for task in alone} == {16}
    rows = [{**row(DEFAULTS["uucb"], 16, overhead=ratio), "ratio": ratio} for ratio in RATIOS]
    assert headline_of_ratios(rows) == {
        "overhead_eighth": 0.125, "overhead_half": 0.5, "overhead_two": 2.0,
    }  # fmt: skip


def row(staleness: int, slots: int = 1_000, **more: float) -> dict[str, object]:
    figures = {"overhead": 0.01, "rifb_loss": 0.02, "agreement": 0.5, **more}
    return {
        "slots": slots, "ratio": 0.125, "tail": True, "storm": False, "rule": "uucb", "staleness": staleness,
        **figures,
    }  # fmt: skip


def test_the_headline_is_that_of_the_hard_cell() -> None:
    rows = [row(0, 16, overhead=9.0), row(0, overhead=7.0), row(DEFAULTS["uucb"]), row(64, overhead=5.0)]
    found = headline(rows)
    assert list(found) == ["overhead_sync", "overhead", "rifb_loss", "agreement"]
    assert found == {"overhead_sync": 7.0, "overhead": 0.01, "rifb_loss": 0.02, "agreement": 0.5}
    with pytest.raises(results.BenchmarkFailed, match="was not measured"):
        headline(rows[:2])


def test_a_small_cell_goes_through_and_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Cell(slots=8, ratio=0.25, tail=True, continuations=8)
    task = Task(cell=small, arms=(("uucb", 0), ("uucb", 16)), seed=0, trees=4)
    monkeypatch.setattr(speculation, "plan", lambda full, seeds, huge: [task])
    monkeypatch.setattr(speculation, "headline", lambda rows: {"overhead": rows[-1]["overhead"]})
    words = ["--work", str(tmp_path / "work"), "--results", str(tmp_path)]

    def broken(*_: object, **__: object) -> str:
        raise results.BenchmarkFailed("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(results, "finish", broken)
        with pytest.raises(results.BenchmarkFailed):
            speculation.main(words)
    assert "8/0.25/tail/uucb, seed 0, 4 arms" in capsys.readouterr().out
    assert speculation.main(words) == 0
    said = capsys.readouterr().out
    assert "arms" not in said, "it was kept"
    assert said.splitlines()[-1].startswith("speculation: overhead=")
    kept = json.loads((tmp_path / "speculation-quick.json").read_text())
    assert [run["rule"] for run in kept["runs"]] == ["flat", "null", "uucb", "uucb"]
    assert kept["runs"][0]["overhead"] == 0.0 and kept["rows"] and kept["real"] == []
    assert not (tmp_path / "work" / "partial.json").exists()
