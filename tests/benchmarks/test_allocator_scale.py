"""The load that the core is timed with is a lawful run, and each cell says what it measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocator_scale
from benchmarks.allocator_load import LEARNER, TURNS, Journal, Load, word
from benchmarks.allocator_scale import RULES, Cell, cells, headline, measure
from common.config_allocator import RandomRuleConfig, RuleConfig
from common.journal import JournalWriter, read_journal
from common.messages import Expanded, Finished, Starting

TINY = Cell(part="growth", trees=6, continuations=10, actors=4, slots=2, grants=50)


def load(rule: RuleConfig | None = None, **more: Any) -> Load:
    made = Load(rule or RandomRuleConfig(), trees=6, continuations=10, **more)
    made.hire(6, 4)
    return made


def test_the_load_keeps_the_law_and_as_many_trees_open_as_it_was_told() -> None:
    going = load()
    going.run_for(200)
    assert going.core.audit() == []
    assert going.core.open_trees <= 6 and going.closed > 10
    stats = going.core.stats()
    assert stats["leases/issued"] == going.grants and stats["leases/failed"] == 0
    assert not any(name in stats for name in ("events/gaps", "events/duplicates", "events/invalid"))


def test_actors_come_and_go_and_nothing_is_lost() -> None:
    going = load()
    going.run_for(60)
    going.dismiss(4)
    going.run_for(60)
    going.hire(20, 1)
    going.run_for(60)
    assert going.core.audit() == [] and going.core.stats()["peers/actors"] == 22


def test_anchors_are_the_open_turns_and_the_prompts_of_all_open_trees() -> None:
    going = load()
    going.run_for(30)
    trees = going.core.state.forest.trees.values()
    assert going.anchors == sum(len(tree.anchors()) for tree in trees if tree.nodes) > 6


def test_a_lease_says_that_it_starts_each_turn_and_its_end() -> None:
    going = load()
    going.run_for(1)
    _, lease, _ = going._running[0]
    said = [type(word(lease, number)) for number in range(TURNS + 2)]
    assert said == [Starting, *[Expanded] * TURNS, Finished]


def test_the_journal_holds_every_input_before_what_it_led_to(tmp_path: Path) -> None:
    with JournalWriter(tmp_path / "journal.tw") as writer:
        going = load(journal=Journal(writer))
        going.run_for(20)
    records = list(read_journal(tmp_path / "journal.tw"))
    assert sum(record.kind == "input" for record in records) == going.messages
    assert sum(record.kind == "lease_issued" for record in records) == going.grants
    assert records[0].kind == "input" and records[0].fields["peer"] == LEARNER


@pytest.mark.parametrize("journal", [False, True])
def test_a_cell_says_what_a_grant_and_an_anchor_cost(journal: bool) -> None:
    found = measure(
        Cell(part="growth", trees=6, continuations=10, actors=4, slots=2, grants=50, journal=journal)
    )
    assert found["us_per_grant"] > 0 and found["grants_per_s"] == pytest.approx(1e6 / found["us_per_grant"])
    assert found["anchors"] > 6 and len(found["windows"]) == 5
    said = sum(window["messages_per_grant"] * window["grants"] for window in found["windows"])
    assert said > 3 * 50, "a grant is counted with what is said of it"


def test_every_part_is_measured_in_both_tiers_and_all_rules_are_known() -> None:
    for quick in (True, False):
        planned = cells(quick)
        assert {cell.part for cell in planned} == {"growth", "actors", "journal", "rules", "large trees"}
        assert {cell.rule for cell in planned} <= set(RULES)
    anchors = [cell.trees * 64 for cell in cells(False) if cell.part == "growth"]
    assert anchors[0] == 1_024 and anchors[-1] == 1_024_000


def entry(part: str, trees: int, us: float, memory: float = 2_000.0) -> dict[str, Any]:
    return {
        "part": part, "trees": trees, "us_per_grant": us, "grants_per_s": 1e6 / us, "bytes_per_anchor": memory,
    }  # fmt: skip


def test_the_headline_compares_the_greatest_number_of_anchors_with_the_smallest() -> None:
    runs = [
        entry("growth", 16, 50.0), entry("growth", 16_000, 80.0), entry("growth", 16_000, 90.0),
        entry("growth", 16_000, 85.0, 1_500.0), entry("journal", 16, 100.0), entry("journal", 16_000, 200.0),
    ]  # fmt: skip
    found = headline(runs)
    assert list(found) == ["grants_per_s", "grants_per_s_journal", "growth", "bytes_per_anchor"]
    assert found["growth"] == pytest.approx(1.7) and found["grants_per_s_journal"] == pytest.approx(5_000)
    assert found["bytes_per_anchor"] == 2_000.0


def test_the_command_writes_its_cells_and_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [TINY, Cell(part="journal", trees=6, continuations=10, actors=4, slots=2, grants=50, journal=True)]
    monkeypatch.setattr(allocator_scale, "cells", lambda quick: both)
    assert allocator_scale.main(["--quick", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("allocator_scale: grants_per_s=")
    kept = json.loads((tmp_path / "allocator_scale-quick.json").read_text())
    assert [run["part"] for run in kept["runs"]] == ["growth", "journal"]
    assert kept["runs"][0]["windows"] and kept["headline"]["growth"] == 1.0


@pytest.mark.slow
def test_a_grant_costs_no_more_than_four_times_as_much_with_a_hundred_times_the_anchors() -> None:
    few, many = (measure(cell) for cell in cells(True) if cell.part == "growth" and cell.trees in (16, 1_600))
    assert many["us_per_grant"] < 4 * few["us_per_grant"]
