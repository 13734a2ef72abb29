"""Gains are paired by map, and their intervals are those of drawing maps again."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.gains import bits, compact, compare, gain, mean_gain


def evaluation(successes: str) -> dict[str, Any]:
    """An evaluation's result whose tasks are listed in another order than they count."""
    episodes = [{"task": task, "success": bit == "1"} for task, bit in enumerate(successes)]
    rate = successes.count("1") / len(successes)
    return {"success": rate, "low": 0.0, "high": 1.0, "mean_turns": 3.0, "per_task": episodes[::-1]}


def test_episodes_are_kept_in_the_order_of_their_maps() -> None:
    assert bits(evaluation("0110")) == "0110"


def test_a_gain_is_the_mean_difference_on_the_same_maps() -> None:
    assert gain("0101", "0111")["mean"] == 0.25
    assert gain("1111", "0000")["mean"] == -1.0


def test_equal_episodes_have_a_gain_of_exactly_nothing() -> None:
    assert gain("0101", "0101") == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_pairing_matters_equal_rates_on_other_maps_are_not_surely_equal() -> None:
    found = gain("01" * 50, "10" * 50)
    assert found["mean"] == 0.0 and found["low"] < -0.1 and found["high"] > 0.1


def test_the_interval_is_that_of_drawing_maps_with_replacement() -> None:
    rng = random.Random(3)
    before = "".join(rng.choice("01") for _ in range(120))
    after = "".join(rng.choice("011") for _ in range(120))
    pairs = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    drawn = sorted(sum(rng.choices(pairs, k=120)) / 120 for _ in range(4000))
    found = gain(before, after)
    assert found["low"] == pytest.approx(drawn[100], abs=0.02)
    assert found["high"] == pytest.approx(drawn[3899], abs=0.02)
    assert found == gain(before, after), "the same draws each time"


def test_other_maps_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="the same maps"):
        gain("01", "011")
    with pytest.raises(ValueError, match="the same maps"):
        gain("", "")


def test_two_evaluations_are_compared_by_mode_with_their_raw_episodes() -> None:
    before = compact({"sampled": evaluation("0001"), "greedy": evaluation("0011")})
    after = compact({"sampled": evaluation("0111"), "greedy": evaluation("0011")})
    found = compare(before, after)
    assert found["sampled"]["gain"]["mean"] == 0.5 and found["greedy"]["gain"]["mean"] == 0.0
    assert (found["sampled"]["before"]["episodes"], found["sampled"]["after"]["episodes"]) == ("0001", "0111")


def test_the_mean_over_seeds_is_of_one_arm_and_none_where_it_was_not_run() -> None:
    runs = [
        {"arm": arm, "sampled": {"gain": {"mean": value}}, "greedy": {"gain": {"mean": value / 2}}}
        for arm, value in (("default", 0.2), ("default", 0.4), ("lr0", 0.0))
    ]
    assert mean_gain(runs, "default") == pytest.approx(0.3)
    assert mean_gain(runs, "default", "greedy") == pytest.approx(0.15)
    assert mean_gain(runs, "shuffled") is None
