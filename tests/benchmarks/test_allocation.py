"""The allocation benchmark measures what it says it measures, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allocation
from benchmarks.allocation import options, scaled, tier, weigh
from benchmarks.allocation_arms import BUDGETS, READERS, RULES, Arm, Bench, Length
from benchmarks.allocation_plan import FACTORS, FLAT, RANDOM, Tier, variants
from benchmarks.allocation_runs import Runs
from benchmarks.allocation_tables import allocation as allocation_table
from benchmarks.partial import Partial
from benchmarks.population import POPULATIONS
from common.errors import ConfigError

FULL, QUICK = Tier(Length(), quick=False), Tier(Length(), quick=True)


def test_the_full_tier_has_every_rule_with_every_budget_and_the_learned_predictor_on_every_population() -> (
    None
):
    for population in POPULATIONS.values():
        arms = set(FULL.arms(population))
        for rule in RULES:
            for budget in BUDGETS:
                asked = rule in READERS or budget != "fixed"
                known = "shared" if asked or rule == "flat" else "none"
                assert Arm(rule, budget, known) in arms


def test_trace_and_uucb_are_also_told_nothing_everything_noise_and_all_between() -> None:
    known = {"none", "noise", "oracle", "history", "0.60", "0.70", "0.80", "0.90"}
    for name, arm in (
        ("A", ("trace", "trace_roots")),
        ("A", ("uucb", "adaptive")),
        ("C", ("uucb", "adaptive")),
    ):
        found = {a.predictor for a in FULL.arms(POPULATIONS[name]) if (a.rule, a.budget) == arm}
        assert known <= found, name


def test_no_predictor_is_asked_to_be_better_than_an_oracle() -> None:
    assert "0.95" in {arm.predictor for arm in FULL.arms(POPULATIONS["A"])}
    assert "0.95" not in {arm.predictor for arm in FULL.arms(POPULATIONS["C"])}, "an oracle has 0.939 there"


def test_the_quick_tier_has_the_controls_and_the_arms_of_the_papers() -> None:
    arms = {name: set(QUICK.arms(population)) for name, population in POPULATIONS.items()}
    assert {Arm("trace", "trace_roots", each) for each in ("shared", "noise", "oracle")} <= arms["A"] & arms[
        "B"
    ]
    assert {Arm("uucb", "adaptive", each) for each in ("shared", "oracle")} <= arms["C"]
    assert {(arm.rule, arm.budget) for arm in arms["A"]} == {(r, b) for r in RULES for b in BUDGETS}


def test_both_tiers_have_at_least_twenty_seeds() -> None:
    assert options([]).seeds >= 20 and options(["--quick"]).seeds >= 20
    assert tier(options(["--quick", "--waves", "3"])).length.waves == 3


@pytest.mark.parametrize("words", [["--seeds", "1"], ["--waves", "0"], ["--only", "A,D"]])
def test_a_mistake_is_one_sentence(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[0]):
        options(words)


def test_points_that_differ_by_a_factor_are_one_measurement(tmp_path: Path) -> None:
    assert scaled((0.5, 2.0, 1.0)) == (0.25, 1.0, 0.5) == scaled((1.0, 4.0, 2.0))

    class Counting(Bench):
        def grow(self, population: Any, arm: Arm, size: int, seed: int) -> Any:
            return Bench(Length(batch=1, warm=0, burn_in=0, waves=1)).grow(population, FLAT, 2, seed)

    runs = Runs(Counting(Length()), 2, Partial(tmp_path / "partial.json", {}), lambda line: None)
    grid = weigh(runs)
    assert len(grid["points"]) == len(FACTORS) ** 3 == 125
    assert grid["distinct"] == len(runs.found) == 61
    assert grid["plateau"] == 1.0, "all points are the same here"


def test_variants_keep_the_flat_rate_and_differ_in_a_constant_of_ours() -> None:
    found = list(variants())
    assert len({population.name for population, _ in found}) == len(found) == 8
    for population, arms in found:
        assert population.mixed(population.group) == pytest.approx(population.flat_rate, abs=1e-6)
        assert {arm.predictor for arm in arms} == {"shared", "noise", "oracle"}
        default = POPULATIONS[population.name[0]]
        changed = (population.reveal != default.reveal) + (population.prompt_noise != default.prompt_noise)
        assert changed == 1


@pytest.fixture(name="small")
def small_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four arms, and runs of one short wave."""
    few = [FLAT, RANDOM, Arm("trace", "trace_roots"), Arm("trace", "trace_roots", "noise")]
    monkeypatch.setattr(Tier, "arms", lambda self, population: iter(few))
    monkeypatch.setattr(Tier, "parts", ("A", "B"))
    monkeypatch.setattr(allocation, "tier", lambda args: Tier(Length(8, 1, 0, 1), quick=True))


@pytest.mark.usefixtures("small")
def test_the_results_are_written_once_all_parts_are_there_and_hold_both_accountings_of_every_arm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--seeds=2", f"--work={tmp_path / 'work'}", f"--results={tmp_path}"]
    assert allocation.main([*words, "--only=B"]) == 0
    assert "no results file yet: A are missing" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.json"))
    assert allocation.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert not [line for line in out if line.startswith("B ")], "B was measured before"
    last = out[-1]
    found = json.loads((tmp_path / "allocation-quick.json").read_text())
    assert last == found["last_line"] and last.startswith("allocation: contrast_lift=")
    assert "noise_lift=" in last
    assert {(row["population"], row["rule"], row["accounting"]) for row in found["rows"]} == {
        (name, rule, how)
        for name in ("A", "B")
        for rule in ("flat", "random", "trace")
        for how in ("continuations", "tokens")
    }
    assert all(len(run["sums"]["mixed"]) == 2 for run in found["runs"]), "one value a seed"
    assert found["populations"]["A"]["exact_flat_rate"] == pytest.approx(0.268, abs=1e-6)
    equal = [row for row in found["rows"] if row["accounting"] == "tokens"]
    assert [row["tokens_ratio"] for row in equal] == pytest.approx([1.0] * len(equal), abs=0.006)
    assert not list((tmp_path / "work").iterdir()), "nothing is taken up any more"
    page = allocation_table(found)
    assert "| trace | trace_roots |" in page and "**Population B**" in page
    assert "TRACE's roots and prefixes" in page and "| A | trace × trace_roots | noise | 0.500 |" in page
