"""The page of benchmarks holds what the results files generate, and nothing typed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.results import begin, finish
from benchmarks.tables import DOCS, TABLES, render
from common.errors import StorageError
from tests.benchmarks.test_controls import AFTER, SUPERVISED, entry

PAGE = "".join(f"# {name}\n\n<!-- {name} -->\nold\n<!-- /{name} -->\nkept\n" for name in TABLES)


def ring_run(name: str) -> dict[str, Any]:
    shares = {"leases": 0.1, "engine": 0.9}
    return {
        "run": name,
        "actor_wait": 0.1,
        "actors": {"actor-0": shares},
        "learner": {"train": 0.5, "trees": 0.5},
        "allocator": {"idle": 1.0},
        "tokens": {"trained": 10},
        "wire": {"weights": 2000.0, "total": 2500.0, "unmatched_share": 0.0},
    }


def test_the_page_is_what_the_results_files_generate() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text == render(text), "run python -m benchmarks.tables"


def test_a_table_that_was_not_measured_says_how_to_measure_it(tmp_path: Path) -> None:
    text = render(PAGE, tmp_path)
    assert "Not measured yet: `python -m benchmarks.allocator_fleet`." in text
    assert "old" not in text and text.count("kept") == len(TABLES)
    assert render(text, tmp_path) == text


def test_tables_are_made_from_the_results_with_where_they_come_from(tmp_path: Path) -> None:
    runs = [ring_run("repeat-0"), ring_run("repeat-1")]
    more = {"noise": {"actor_wait": 0.02}, "sensitivity": {"actor_wait": 0.1, "actor_wait_synchronous": 0.42}}
    finish(begin("ring", ["--seed", "1"]), {"actor_wait": 0.1}, runs, tmp_path, **more)
    text = render(PAGE, tmp_path)
    assert "| repeat-1 | 0.100 |" in text and "| noise | 2.0 % |" in text
    assert "`actor_wait` goes from 0.100 to 0.420." in text
    assert "| learner | train | 50.0 % |" in text
    assert "| weights | 200 |" in text and "unmatched" not in text
    assert "`python -m benchmarks.ring --seed 1`" in text and "load average" in text


def test_the_controls_have_a_row_for_each_seed_and_arm_and_the_checks_with_the_one_that_fails(
    tmp_path: Path,
) -> None:
    runs = [entry(2, arm) for arm in (*AFTER, *SUPERVISED)]
    failing = [{"asked": "gain at least 0.25", "measured": "0.100 in the worst seed", "holds": False}]
    finish(begin("controls", []), {"gain": 0.5}, runs, tmp_path, checks=failing)
    text = render(PAGE, tmp_path)
    assert "| 2 | supervised_tenth | 0.250 [0.250, 0.250] | 0.500 [0.500, 0.500] | 0.250 [" in text
    assert "| gain at least 0.25 | 0.100 in the worst seed | **no** |" in text


def test_the_fleet_has_its_speed_in_a_row(tmp_path: Path) -> None:
    run = {"rule": "random", "actors": 1000, "events": 1_000_000, "seconds": 55.25, "events_per_s": 18099.5}
    finish(begin("fleet", [], module="allocator_fleet"), {"events": 1}, [run], tmp_path)
    assert "| random | 1000 | 1000000 | 55.250 | 18100 |" in render(PAGE, tmp_path)


def test_the_scale_has_a_row_for_each_cell(tmp_path: Path) -> None:
    run = {
        "part": "journal", "rule": "random", "trees": 16, "anchors": 1028, "actors": 1000, "journal": True,
        "us_per_grant": 140.2, "grants_per_s": 7135.4, "bytes_per_anchor": 1713.0,
    }  # fmt: skip
    finish(begin("allocator_scale", []), {"growth": 1.0}, [run], tmp_path)
    text = render(PAGE, tmp_path)
    assert "| journal (by the clock) | random | 1,028 | 64.250 | 1,000 | 140 | 7,135 | 1713 |" in text


def speculation_row(rule: str, staleness: int, slots: int = 1_000, **more: float) -> dict[str, Any]:
    figures = {"overhead": 0.0, "agreement": 1.0, "idle": 0.1, "wasted": 0.0, "revoked": 0.0}
    where = {
        "slots": slots,
        "ratio": 0.125,
        "tail": True,
        "storm": False,
        "rule": rule,
        "staleness": staleness,
    }
    return {**where, **figures, "seeds": 1, **more}


def test_speculation_has_overheads_in_one_table_and_large_cells_in_another_with_the_default_in_bold(
    tmp_path: Path,
) -> None:
    quality = {
        "rifb": 0.5,
        "rifb_flat": 0.4,
        "rifb_loss": 0.02,
        "rifb_loss_se": 0.013,
        "mixed": 0.7,
        "mixed_flat": 0.6,
    }
    rows = [
        speculation_row("flat", 0), speculation_row("null", 0, overhead=-0.0001),
        speculation_row("uucb", 0, overhead=7.4, **quality), speculation_row("uucb", 48, overhead=0.011, **quality),
        speculation_row("uucb", 48, slots=16, overhead=0.3, **quality),
    ]  # fmt: skip
    real = [{"arm": "D=0", "rule": "uucb", "staleness": 0, "tokens_per_s": 361.0, "overhead": 1.887}]
    finish(
        begin("speculation", []),
        {"overhead": 0.011},
        [],
        tmp_path,
        rows=rows,
        real=real,
        defaults={"uucb": 48},
    )
    text = render(PAGE, tmp_path)
    assert "| 1,000 | 0.125 | heavy | uucb | 740.0 % | 1.1 % |" in text
    assert "| 16 | 0.125 | heavy | uucb |  | 30.0 % |" in text
    assert "| 1,000 | 0.125 | heavy | flat, other prompts | 0.0 % |  |" in text
    assert "| uucb | **48** | 1.1 % | 2.0 ± 1.3 % | 0.500 (flat 0.400) |" in text
    assert text.count("trees per slot, heavy tails") == 1, "no table of its own for 16 slots"
    assert "| D=0 | uucb | 0 | 361 | 188.7 % |" in text


def test_a_page_without_a_table_or_with_two_of_it_is_refused(tmp_path: Path) -> None:
    for text in ("", PAGE + PAGE):
        with pytest.raises(StorageError, match="must hold the table"):
            render(text, tmp_path)


def test_results_elsewhere_leave_the_page_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updated = []
    monkeypatch.setattr(tables, "update", lambda: updated.append(1))
    tables.update_if_committed(tmp_path)
    assert updated == []
    tables.update_if_committed(tables.RESULTS)
    assert updated == [1]
