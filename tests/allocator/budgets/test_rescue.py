"""What the model of rescues sees of a tree, and how it learns from few attempts."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest

from allocator.budgets.rescue import FEATURES, KEPT, RescueModel, Row, describe_uniform, mixed
from allocator.rules.flat import FlatRule
from common.nouns import RewardSource
from tests.allocator.rules.garden import Garden


def seen(garden: Garden) -> dict[str, float]:
    row = describe_uniform(garden.tree)
    assert row is not None
    return dict(zip(FEATURES, row, strict=True))


def row_of(**known: float) -> Row:
    return tuple(known.get(name, 1.0 if name == "bias" else 0.0) for name in FEATURES)


# -------------------------------------------------------------------------------------------- the features


def test_a_tree_of_failures_is_described_as_worked_out_by_hand() -> None:
    """Two continuations from the prompt (V = 0.4) and one from the first turn of the first (V = 0.7)."""
    garden = Garden(FlatRule(), 3, success=0.4)
    first = garden.start()
    anchor = garden.turn(first, 0.7, entropies=[1.0, 2.0])
    garden.turn(first, last=True, entropies=[0.5])
    garden.end(first, 0.0)
    second = garden.start()
    garden.turn(second, last=True)
    garden.end(second, 0.0)
    third = garden.start(anchor)
    garden.turn(third, 0.2, entropies=[4.0])
    garden.turn(third, last=True)
    garden.end(third, 0.0)
    assert seen(garden) == pytest.approx(
        {
            "bias": 1.0,
            "success": 0.0,
            "continuations": math.log2(4) / 4,
            "from_root": 2 / 3,
            "depth": math.log2(1 + (2 + 1 + 3) / 3) / 4,
            "entropy": (1.5 + 0.5 + 4.0) / 3 / 3,
            "value_before": 0.4,
            "value": 0.4,
            "value_std": 0.2,
            "flip_mean": (0.4 + 0.7 + 0.2) / 3,
            "flip_most": 0.7,
        }
    )


def test_where_all_succeeded_a_flip_is_a_failure() -> None:
    garden = Garden(FlatRule(), 3, success=0.9)
    garden.path([0.6, 0.95], 1.0)
    found = seen(garden)
    assert found["success"] == 1.0
    assert found["flip_most"] == pytest.approx(0.4)
    assert found["flip_mean"] == pytest.approx((0.1 + 0.4 + 0.05) / 3)


def test_a_tree_with_both_outcomes_or_none_is_not_uniform() -> None:
    garden = Garden(FlatRule(), 4)
    assert describe_uniform(garden.tree) is None and not mixed(garden.tree)
    garden.path([0.5], None)
    assert describe_uniform(garden.tree) is None, "what was dropped is no outcome"
    garden.path([0.5], 1.0)
    assert describe_uniform(garden.tree) is not None
    garden.path([0.5], 0.0)
    assert describe_uniform(garden.tree) is None and mixed(garden.tree)


@pytest.mark.parametrize("source", [RewardSource.PRUNE_RULE, RewardSource.PSEUDO_REWARD])
def test_what_a_rule_says_of_a_path_is_no_outcome(source: RewardSource) -> None:
    garden = Garden(FlatRule(), 4)
    garden.path([0.5], 1.0)
    stopped = garden.start()
    garden.turn(stopped, 0.5)
    garden.end(stopped, 0.0, source)
    assert not mixed(garden.tree) and seen(garden)["success"] == 1.0


def test_all_features_are_of_order_one() -> None:
    garden = Garden(FlatRule(), 100, success=0.5)
    for _ in range(60):
        garden.path([0.5] * 6, 0.0)
    assert all(0 <= value <= 1.5 for value in seen(garden).values())


# --------------------------------------------------------------------------------------------- the learning


def attempts(count: int, seed: int = 0) -> tuple[list[Row], list[bool]]:
    """Rescues happen where `flip_most` is high, rarely elsewhere."""
    rng = random.Random(seed)
    rows = [row_of(flip_most=rng.random(), depth=rng.random()) for _ in range(count)]
    place = FEATURES.index("flip_most")
    return rows, [rng.random() < (0.8 if row[place] > 0.5 else 0.05) for row in rows]


def test_before_any_attempt_every_tree_looks_hopeful_and_the_less_known_the_more() -> None:
    model = RescueModel()
    assert model.chance(row_of()) == 0.5
    assert model.score(row_of()) == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert model.score(row_of(flip_most=1.0)) == pytest.approx(1 / (1 + math.exp(-math.sqrt(2.0))))


def test_attempts_that_fail_take_the_hope_from_their_kind_only() -> None:
    model = RescueModel()
    tried, other = row_of(flip_mean=1.0), row_of(flip_most=1.0)
    before = model.score(other)
    assert before == model.score(tried)
    model.learn([tried] * 30, [False] * 30)
    assert model.score(tried) < 0.15 < 0.35 < model.score(other) < before


def test_it_learns_which_trees_can_be_rescued() -> None:
    model = RescueModel()
    rows, rescued = attempts(300)
    model.learn(rows, rescued)
    assert model.chance(row_of(flip_most=0.95, depth=0.5)) > 0.7
    assert model.chance(row_of(flip_most=0.05, depth=0.5)) < 0.1
    before = model.loss
    more, happened = attempts(300, seed=1)
    model.learn(more, happened)
    assert before == pytest.approx(math.log(2)), "the first attempts met a model that knew nothing"
    assert model.loss is not None and model.loss < 0.5


def test_the_fit_is_the_greatest_posterior_by_finite_differences() -> None:
    rows, rescued = attempts(40)
    model = RescueModel()
    model.learn(rows, rescued)

    def surprise(weights: np.ndarray) -> float:
        total = float(weights @ weights) / 2
        for row, hit in zip(rows, rescued, strict=True):
            p = 1 / (1 + math.exp(-float(np.dot(row, weights))))
            total -= math.log(p if hit else 1 - p)
        return total

    weights, step = model._weights, 1e-5
    for axis in np.eye(len(FEATURES)):
        slope = (surprise(weights + step * axis) - surprise(weights - step * axis)) / (2 * step)
        assert slope == pytest.approx(0, abs=1e-6)
        bend = (
            surprise(weights + 1e-3 * axis) + surprise(weights - 1e-3 * axis) - 2 * surprise(weights)
        ) / 1e-6
        assert bend == pytest.approx(float(axis @ np.linalg.inv(model._covariance) @ axis), rel=1e-3)


def test_one_fit_of_all_attempts_equals_many_of_some() -> None:
    rows, rescued = attempts(60)
    once, often = RescueModel(), RescueModel()
    once.learn(rows, rescued)
    for start in range(0, 60, 7):
        often.learn(rows[start : start + 7], rescued[start : start + 7])
    assert once.chance(rows[0]) == often.chance(rows[0]) and once.score(rows[9]) == often.score(rows[9])


def test_attempts_that_cannot_be_told_apart_from_their_results_do_not_run_away() -> None:
    model = RescueModel()
    rows = [row_of(flip_most=float(k % 2)) for k in range(KEPT)]
    model.learn(rows, [k % 2 == 1 for k in range(KEPT)])
    assert np.abs(model._weights).max() < 20
    assert model.chance(row_of(flip_most=1.0)) > 0.95 > 0.05 > model.chance(row_of(flip_most=0.0))


def test_old_attempts_are_forgotten() -> None:
    model, late = RescueModel(), RescueModel()
    rows, rescued = attempts(KEPT)
    model.learn([row_of()] * 100, [True] * 100)
    model.learn(rows, rescued)
    late.learn(rows, rescued)
    assert model.chance(rows[3]) == late.chance(rows[3])


def test_no_attempts_teach_nothing() -> None:
    model = RescueModel()
    model.learn([], [])
    assert model.loss is None and model.chance(row_of()) == 0.5


def test_it_goes_on_from_its_state_exactly() -> None:
    rows, rescued = attempts(50)
    kept, fresh = RescueModel(), RescueModel()
    kept.learn(rows, rescued)
    fresh.from_state(msgspec.msgpack.decode(msgspec.msgpack.encode(kept.to_state())))
    assert fresh.to_state() == kept.to_state()
    for model in (kept, fresh):
        model.learn(*attempts(20, seed=2))
    assert fresh.score(rows[0]) == kept.score(rows[0]) and fresh.loss == kept.loss
