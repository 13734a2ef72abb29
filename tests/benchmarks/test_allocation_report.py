"""Lifts, their errors, and what is said of the papers' figures."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from benchmarks.allocation_arms import Arm
from benchmarks.allocation_report import (
    checks,
    gain_of,
    headline,
    lift_of,
    mean_of,
    needed_auc,
    plateau,
    row,
    without_luck,
)
from benchmarks.allocation_runs import Matched, Measured
from benchmarks.contrast import Sums


def entry(population: str, rule: str, budget: str, predictor: str, **values: Any) -> dict[str, Any]:
    known = {
        "population": population, "rule": rule, "budget": budget, "predictor": predictor,
        "overhead": 0.05 if budget == "adaptive" else None,
        "candidates": 4 if budget == "trace_roots" else None, "accounting": "tokens",
        "contrast_lift_exact": (1.0, 0.1), "contrast_over_random": (1.0, 0.1), "mixed_gain_exact": (0.0, 0.01),
        "leaves_ratio": 1.0, "auc_roots": 0.9,
    }  # fmt: skip
    return {**known, **values}


def test_a_mean_over_seeds_has_its_standard_error() -> None:
    values = [0.2, 0.4, 0.9]
    assert mean_of(values) == pytest.approx((0.5, statistics.stdev(values) / 3**0.5))
    assert mean_of([0.7]) == (0.7, 0.0)


def test_a_lift_is_the_ratio_of_means_and_its_error_is_that_of_resampled_seeds() -> None:
    draws = np.random.default_rng(0)
    base = draws.uniform(0.2, 0.4, 40)
    values = 2 * base + draws.normal(0, 0.05, 40)
    lift, error = lift_of(list(values), list(base))
    assert lift == pytest.approx(values.mean() / base.mean())
    picks = draws.integers(0, 40, (4000, 40))
    assert error == pytest.approx((values[picks].mean(1) / base[picks].mean(1)).std(), rel=0.1)


def test_arms_that_do_the_same_in_every_seed_have_a_lift_of_one_and_no_error() -> None:
    assert lift_of([0.1, 0.5, 0.3], [0.1, 0.5, 0.3]) == (1.0, 0.0)
    assert gain_of([0.1, 0.5, 0.3], [0.1, 0.5, 0.3]) == (0.0, 0.0)
    assert gain_of([0.3, 0.4], [0.1, 0.2])[0] == pytest.approx(0.2)


def test_known_luck_of_the_baseline_is_taken_out_of_an_arm_that_shares_it() -> None:
    draws = np.random.default_rng(1)
    told, plain = [], []
    for _ in range(300):
        luck = draws.normal(0, 0.05, 20)
        arm = 0.6 + luck + draws.normal(0, 0.01, 20)
        value, error = without_luck(list(arm), list(0.3 + luck), 0.3)
        told.append((value, error))
        plain.append(arm.mean())
    values = np.array([value for value, _ in told])
    assert values.mean() == pytest.approx(0.6, abs=0.001), "it estimates the same"
    assert values.std() < 0.3 * np.std(plain), "with far less noise"
    assert np.mean([error for _, error in told]) == pytest.approx(values.std(), rel=0.15)


def test_luck_that_an_arm_does_not_share_stays_out_of_it() -> None:
    draws = np.random.default_rng(2)
    errors = [
        without_luck(list(draws.normal(0.6, 0.05, 20)), list(draws.normal(0.3, 0.05, 20)), 0.3)[0] - 0.6
        for _ in range(400)
    ]
    assert np.std(errors) == pytest.approx(0.05 / 20**0.5, rel=0.15)
    assert without_luck([0.5, 0.7], [0.1, 0.9], 0.3) == mean_of([0.5, 0.7]), "two seeds tell of no slope"


def test_a_row_sets_an_arm_beside_its_baseline() -> None:
    def measured(size: int, mixed: float) -> Measured:
        sums = Sums(prompts=10, leaves=10 * size, tokens=100 * size, known=10 * size, mixed=mixed,
                    contrasting=size * mixed, mass=mixed / 2, groups=10, mixed_groups=mixed)  # fmt: skip
        return Measured("A", Arm("trace"), size, (sums, sums))

    flat = measured(12, 2.0)
    found = row(Matched(measured(12, 3.0), measured(24, 9.0), 0.25), flat.sums, "tokens", 0.25)
    assert found["sizes"] == [12, 24] and found["share_of_larger"] == 0.25
    assert found["tokens_ratio"] == pytest.approx(1.25) and found["tokens_ratio_of_sizes"] == [1.0, 2.0]
    assert found["mixed"][0] == pytest.approx(0.45) and found["mixed_lift"][0] == pytest.approx(0.45 / 0.2)
    assert found["mixed_gain"][0] == pytest.approx(0.25)
    assert found["contrast_lift_exact"][0] == pytest.approx(found["contrast"][0] / 0.25)
    assert found["mixed_gain_exact"][0] == pytest.approx(found["mixed"][0] - 0.25)


def test_the_plateau_is_the_share_of_points_near_the_best() -> None:
    values = {(1.0, 1.0, 1.0): 0.600, (1.0, 2.0, 1.0): 0.571, (2.0, 1.0, 1.0): 0.569, (1.0, 1.0, 2.0): 0.3}
    assert plateau(values) == 0.5


def test_the_predictor_that_a_paper_needs_is_read_between_the_swept_ones() -> None:
    rows = [
        entry("A", "trace", "trace_roots", level, contrast_lift_exact=(lift, 0.1))
        for level, lift in (("0.70", 1.26), ("0.90", 2.26 + 0.5), ("0.80", 1.76), ("oracle", 3.5))
    ]
    lift = ("A", ("trace", "trace_roots"), "contrast_lift_exact")
    assert needed_auc(rows, *lift, 2.26) == pytest.approx(0.85)
    assert needed_auc(rows, *lift, 3.0) == pytest.approx(0.9 + (0.98574 - 0.9) * 0.24 / 0.74, abs=1e-4)
    assert needed_auc(rows, *lift, 4.0) is None, "not even with an oracle"


def test_the_headline_says_what_was_measured_at_equal_tokens() -> None:
    rows = [
        entry("A", "trace", "trace_roots", "shared", contrast_lift_exact=(2.4, 0.1)),
        entry("A", "trace", "trace_roots", "noise", contrast_over_random=(0.97, 0.1)),
        entry("C", "uucb", "adaptive", "shared", mixed_gain_exact=(0.05, 0.01)),
        entry("C", "uucb", "adaptive", "shared", accounting="continuations", leaves_ratio=1.04),
        entry(
            "C", "uucb", "adaptive", "shared", accounting="tokens", overhead=0.4, mixed_gain_exact=(0.9, 0.0)
        ),
    ]
    assert headline(rows) == pytest.approx(
        {"contrast_lift": 2.4, "mixed_gain_points": 5.0, "budget_overhead": 0.04, "noise_lift": -0.03}
    )
    assert headline(rows[:1]) == {"contrast_lift": 2.4}


def test_checks_name_what_holds_and_what_does_not() -> None:
    rows = [
        entry("A", "flat", "fixed", "shared", accounting="continuations", auc_roots=0.91),
        entry("A", "trace", "trace_roots", "shared", contrast_lift_exact=(1.8, 0.1)),
        entry("A", "trace", "trace_roots", "noise", contrast_over_random=(1.3, 0.1)),
        entry("A", "trace", "trace_roots", "oracle", contrast_lift_exact=(3.1, 0.1)),
        entry("C", "uucb", "adaptive", "shared", mixed_gain_exact=(0.2, 0.01)),
        entry("C", "uucb", "adaptive", "shared", accounting="continuations", leaves_ratio=1.06),
    ]
    found = {check["asked"]: check for check in checks(rows, {"plateau": 0.8})}
    holds = {asked: check["holds"] for asked, check in found.items()}
    assert holds == {
        "A: noise gives no lift over random": False,
        "A: the oracle lifts above 1.5": True,
        "A: TRACE lifts contrast by 2.26": False,
        "C: InfoTree gains 18.2 points of mixed outcomes, equal continuations": False,
        "C: InfoTree gains 18.2 points of mixed outcomes, equal tokens": True,
        "C: overhead below 0.05": False,
        "grid of weights: at least 0.75 within 5 % of the best": True,
    }
    assert "AUC at roots is 0.910" in found["A: TRACE lifts contrast by 2.26"]["measured"]
