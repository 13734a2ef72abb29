"""Figures of arms beside each other, on trees made by hand."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.speculation_arms import Cell, Grown, Measured
from benchmarks.speculation_figures import common_prompts, compare, find, over_seeds

CELL = Cell(slots=8, ratio=0.125, tail=True, continuations=4)
ROOT = (-1, 0)


def tree(wins: str, cost: int = 10, anchors: tuple[tuple[int, int], ...] = (ROOT,) * 4) -> Grown:
    return Grown(tuple(win == "1" for win in wins), (cost,) * len(wins), anchors[: len(wins)])


def arm(trees: list[Grown], useful: float = 0.8, seconds: float = 100.0) -> Measured:
    return Measured(
        useful=useful, occupied=0.8, seconds=seconds, revoked=0.0, declined=0.0, speculative=0.0, changed=0.0,
        agreement=1.0, trees=dict(enumerate(trees)), cpu_s=1.0, events=10,
    )  # fmt: skip


FLAT = arm([tree("1100"), tree("1111")])
SYNCHRONOUS = arm([tree("10"), tree("10")], useful=0.1, seconds=800.0)
SPECULATIVE = arm([tree("1100"), tree("1011")], useful=0.4, seconds=190.0)
ARMS = {("uucb", 0): SYNCHRONOUS, ("uucb", 48): SPECULATIVE}


def test_overhead_is_time_per_useful_token_over_that_of_flat_sampling() -> None:
    rows = compare(CELL, 0, FLAT, ARMS, arm([tree("10")], useful=0.64))
    at = {(row["rule"], row["staleness"]): row for row in rows}
    assert at["flat", 0]["overhead"] == 0.0
    assert at["null", 0]["overhead"] == pytest.approx(0.25)
    assert at["uucb", 0]["overhead"] == pytest.approx(7.0)
    assert at["uucb", 48]["overhead"] == pytest.approx(1.0)
    assert at["uucb", 48]["raw_overhead"] == pytest.approx(0.9)
    assert at["uucb", 48]["wasted"] == pytest.approx(0.5) and at["uucb", 48]["idle"] == pytest.approx(0.2)


def test_contrast_is_compared_at_the_tokens_that_the_synchronous_search_spent() -> None:
    """Two continuations a prompt: the first tree then has won both, the second one of two."""
    row = compare(CELL, 0, FLAT, ARMS, FLAT)[-1]
    assert row["prompts"] == 2
    assert row["rifb"] == pytest.approx(0.5) and row["mixed"] == pytest.approx(0.5)
    assert row["rifb_loss"] == pytest.approx(0.5) and row["mixed_ratio"] == pytest.approx(0.5)
    assert row["rifb_flat"] == 0.0


def test_prompts_count_up_to_the_first_that_some_arm_has_not_finished() -> None:
    late = dataclasses.replace(FLAT, trees={0: tree("10"), 2: tree("10"), 3: tree("10")})
    assert common_prompts([arm([tree("10")] * 4), late]) == [0]


def test_continuations_that_had_to_start_at_the_prompt_do_not_count_as_agreement() -> None:
    one = arm([tree("1010", anchors=(ROOT, ROOT, (0, 1), (1, 0)))])
    other = arm([tree("1010", anchors=(ROOT, ROOT, (0, 1), (2, 0)))])
    rows = compare(CELL, 0, one, {("uucb", 0): one, ("uucb", 8): other}, one)
    assert rows[-1]["same_anchor"] == pytest.approx(0.5)
    assert rows[-2]["same_anchor"] == 1.0


def test_seeds_are_averaged_with_their_standard_error() -> None:
    rows = [row for seed in (0, 1) for row in compare(CELL, seed, FLAT, ARMS, FLAT)]
    rows[-1]["overhead"] = 3.0
    row = find(over_seeds(rows), rule="uucb", staleness=48)
    assert row is not None and row["seeds"] == 2
    assert row["overhead"] == pytest.approx(2.0) and row["overhead_error"] == pytest.approx(1.0)
    assert find(over_seeds(rows), rule="trace") is None
