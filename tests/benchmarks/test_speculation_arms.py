"""One arm: what is kept of a tree, what is counted, and that one seed is one measurement."""

from __future__ import annotations

import pytest

from benchmarks.speculation_arms import (
    PREDICTOR,
    Cell,
    Grown,
    Measured,
    lessons,
    measure,
)
from common.predictors import make_predictor

UNTAUGHT = make_predictor(PREDICTOR).to_state()
CELL = Cell(slots=16, ratio=0.125, tail=False, continuations=12)


def arm(rule: str, staleness: int, cell: Cell = CELL, seed: int = 0) -> Measured:
    return measure(cell, rule, staleness, seed, 12_000, UNTAUGHT, look=2)


def test_outcomes_are_those_that_a_number_of_tokens_pays_for() -> None:
    tree = Grown((True, None, False, True), (10, 5, 10, 10), ((-1, 0), (0, 1), (0, 1), (2, 0)))
    assert tree.outcomes() == [True, False, True]
    assert tree.outcomes(25) == [True, False] and tree.outcomes(24) == [True]
    assert tree.outcomes(0) == [True], "at least one"
    assert tree.rifb(25) == 1.0 and tree.rifb(0) == 0.0
    assert tree.rifb() == pytest.approx(2 * (2 / 9) ** 0.5)
    assert tree.mixed() and not tree.mixed(10)


def test_trees_in_flight_follow_the_ratio_and_batches_are_a_sixteenth_of_them() -> None:
    sizes = [(16, 0.125), (1_000, 0.125), (10_000, 0.125), (16, 2.0)]
    cells = [Cell(slots=slots, ratio=ratio, tail=True) for slots, ratio in sizes]
    assert [(cell.trees, cell.batch) for cell in cells] == [(2, 1), (125, 7), (1250, 78), (32, 2)]


def test_one_seed_is_one_measurement() -> None:
    first, again = arm("uucb", 16), arm("uucb", 16)
    assert (first.useful, first.seconds, first.trees) == (again.useful, again.seconds, again.trees)
    assert arm("uucb", 16, seed=1).trees != first.trees


def test_waiting_leaves_slots_idle_and_speculation_fills_them() -> None:
    flat, waiting, speculating = arm("flat", 0), arm("uucb", 0), arm("uucb", 48)
    assert flat.occupied > 0.85, "flat sampling keeps its slots busy"
    assert waiting.occupied == pytest.approx(2 / 16, abs=0.03), "one lease for each of two trees"
    assert speculating.occupied > 5 * waiting.occupied
    assert waiting.speculative == 0.0 and waiting.agreement == 1.0
    assert speculating.speculative > 0.5 and speculating.agreement < 1.0


def test_continuations_of_a_prompt_are_the_same_in_all_arms() -> None:
    flat, tree = arm("flat", 0).trees, arm("uucb", 0).trees
    for number in set(flat) & set(tree):
        assert flat[number].wins[:2] == tree[number].wins[:2], "the two that start at the prompt"
        assert flat[number].tokens[:2] == tree[number].tokens[:2]


def test_a_storm_loses_no_tokens_and_is_measured_too() -> None:
    storm = arm("uucb", 48, Cell(slots=16, ratio=0.25, tail=True, continuations=12, storm=True))
    assert 0 < storm.useful <= storm.occupied <= 1.0


def test_the_lessons_leave_a_predictor_that_has_learned_and_holds_no_pins() -> None:
    predictor = make_predictor(PREDICTOR)
    predictor.from_state(lessons())
    assert predictor.version >= 16 and not predictor.pinned()
    assert predictor.stats()["brier"] < 0.2
