"""Packed against branch by branch: trees share what was asked for, figures are what they are called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tables, tree_training, tree_training_arm
from benchmarks.results import read_results
from benchmarks.training_trees import BRANCH, branches_of, training_rows, training_tree
from benchmarks.tree_training_arm import PACKED_AGAIN, Trainee, token_ratio
from common.errors import ConfigError
from learner.layout import lay_out, path_of


@pytest.mark.parametrize("sharing", [1, 2, 4, 8])
def test_trees_share_about_what_was_asked_for(sharing: int) -> None:
    rows = training_rows(sharing, trees=3)
    assert token_ratio(rows) == pytest.approx(sharing, rel=0.15)
    assert len(rows) == 3 * branches_of(sharing)
    lengths = [row.length for row in rows]
    assert 0.8 * BRANCH < sum(lengths) / len(lengths) < 1.2 * BRANCH
    assert len(set(lengths)) > len(lengths) / 2, "ragged"


def test_equal_seeds_give_equal_trees() -> None:
    assert training_tree(2, 0, seed=1) == training_tree(2, 0, seed=1) != training_tree(2, 1, seed=1)


def test_the_token_ratio_counts_each_tree_for_itself() -> None:
    rows = training_rows(4, trees=2)
    halves = [[row for row in rows if row.tree == tree] for tree in (0, 1)]
    unique = sum(lay_out(map(path_of, half)).length for half in halves)
    assert token_ratio(rows) == sum(row.length - 1 for row in rows) / unique


def test_both_layouts_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HIDDEN", 32), ("LAYERS", 1), ("HEADS", 2), ("INTERMEDIATE", 32)):
        monkeypatch.setattr(tree_training_arm, name, value)
    rows = training_rows(2, trees=1)
    weights, computed = [], []
    for layout in ("rows", "tree"):
        trainee = Trainee(2560)
        computed.append(trainee.update(rows, layout))
        weights.append(torch.cat([parameter.detach().flatten() for parameter in trainee.model.parameters()]))
    # AdamW's first step is the sign of the gradient: where that is 0 but for rounding, either way.
    assert float(((weights[0] - weights[1]).abs() > 1e-6).float().mean()) < 0.01
    assert computed[0] >= sum(row.length - 1 for row in rows) > 1.6 * computed[1]


def arm(cpu: float) -> list[dict[str, float]]:
    return [{"cpu": cpu, "wall": 3 * cpu}, {"cpu": 100.0, "wall": 300.0}, {"cpu": cpu, "wall": 3 * cpu}]


def test_figures_are_medians_and_their_ratios() -> None:
    found = {"seconds": {"rows": arm(8.0), "tree": arm(1.9), PACKED_AGAIN: arm(2.1)}, "token_ratio": 5.0}
    figures = tree_training.figures(found, {"rows": 400.0, "tree": 300.0})
    assert figures == pytest.approx(
        {
            "speed_up_cpu": 4.0, "speed_up_wall": 4.0, "share_of_limit": 0.8, "null": 1.9 / 2.1,
            "memory_ratio": 0.75,
        }
    )  # fmt: skip


def test_the_headline_takes_the_limit_from_the_largest_sharing_and_the_floor_from_the_smallest() -> None:
    runs = [
        {"sharing": s, "share_of_limit": s / 10, "speed_up_cpu": s + 0.5, "memory_ratio": s / 100}
        for s in (8, 1, 2)
    ]
    assert tree_training.headline(runs) == {
        "share_of_limit": 0.8, "at_sharing_1": 1.5, "memory_ratio": 0.08,
    }  # fmt: skip


def test_a_budget_below_one_branch_is_refused() -> None:
    with pytest.raises(ConfigError, match="a branch of 640 tokens"):
        tree_training.options(["--budget", "100"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_measures_both_layouts_and_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--quick", "--repeats", "1", "--sharing", "1,4", "--tokens", "2600", "--results", str(tmp_path)]
    assert tree_training.main(words) == 0
    found = read_results("tree_training-quick", tmp_path)
    assert found is not None
    assert capsys.readouterr().out.splitlines()[-1] == found["last_line"]
    one, four = found["runs"]
    assert one["computed"]["tree"] == one["computed"]["rows"], "nothing is shared: nothing is packed"
    assert four["speed_up_cpu"] > 2 and 0 < four["memory_ratio"] < 1.2
    assert json.dumps(found)


def test_the_table_has_a_row_for_each_sharing() -> None:
    runs = [
        {
            "token_ratio": ratio, "trees": 2, "branches": 32, "speed_up_cpu": 6.5, "speed_up_wall": 6.25,
            "share_of_limit": 0.915, "null": 1.0, "memory_ratio": 0.75,
        }
        for ratio in (1.0, 7.25)
    ]  # fmt: skip
    found = tables.tree_training({"runs": runs})
    assert "| 7.25 | 2 | 32 | 6.50 | 6.25 | 0.92 | 1.000 | 0.75 |" in found and found.count("\n") == 3
