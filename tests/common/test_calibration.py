"""Brier score, calibration error, AUC, and the recalibration of log-odds, against plain computations."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.calibration import (
    MEMORY,
    PLATT_DISCOUNT,
    PLATT_PRIOR,
    Meter,
    Platt,
    auc,
    log_odds,
    sigmoid,
)

Pairs = list[tuple[float, float]]
pairs = st.lists(
    st.tuples(st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.25, 1.0])), min_size=1
)


def arrays(some: Pairs) -> tuple[np.ndarray, np.ndarray]:
    predicted, outcomes = zip(*some, strict=True)
    return np.array(predicted), np.array(outcomes)


@given(st.lists(pairs, min_size=1, max_size=4))
def test_brier_is_of_the_last_wave_and_the_calibration_error_of_all_with_older_ones_fading(
    waves: list[Pairs],
) -> None:
    meter = Meter()
    bins: dict[int, list[float]] = {}
    for wave in waves:
        meter.record(*arrays(wave))
        bins = {place: [MEMORY * value for value in bin] for place, bin in bins.items()}
        for predicted, outcome in wave:
            bin = bins.setdefault(min(9, int(predicted * 10)), [0.0, 0.0, 0.0])
            bins[min(9, int(predicted * 10))] = [bin[0] + 1, bin[1] + predicted, bin[2] + outcome]
    brier = sum((p - y) ** 2 for p, y in waves[-1]) / len(waves[-1])
    total = sum(count for count, _, _ in bins.values())
    ece = sum(abs(predicted - outcome) for _, predicted, outcome in bins.values()) / total
    assert meter.stats() == pytest.approx({"brier": brier, "ece": ece})


def test_without_predictions_there_is_nothing_to_measure_and_nothing_is_forgotten() -> None:
    meter, nothing = Meter(), np.zeros(0)
    meter.record(nothing, nothing)
    assert meter.stats() == {}
    meter.record(np.array([0.2]), np.array([1.0]))
    before = meter.stats()
    meter.record(nothing, nothing)
    assert meter.stats() == before == pytest.approx({"brier": 0.64, "ece": 0.8})


@given(pairs)
def test_auc_is_the_chance_that_a_success_was_rated_above_a_failure(some: Pairs) -> None:
    wins = losses = above = 0.0
    for p, y in some:
        wins, losses = wins + y, losses + 1 - y
        above += sum(y * (1 - other) * (1.0 if p > q else 0.5 * (p == q)) for q, other in some)
    found = auc(*arrays(some))
    assert (found is None) == (wins * losses == 0)
    assert found is None or found == pytest.approx(above / (wins * losses))


def test_log_odds_and_back_stay_finite_at_the_ends() -> None:
    ends = np.array([0.0, 1e-12, 0.3, 1.0])
    assert np.isfinite(log_odds(ends)).all()
    assert sigmoid(log_odds(ends)) == pytest.approx(ends, abs=1e-5)
    assert sigmoid(np.array([-1e9, 1e9])).tolist() == [0.0, 1.0]


# ------------------------------------------------------------------------------------- recalibration


def platt_loss(
    line: tuple[float, float], start: tuple[float, float], precision: np.ndarray, some: Pairs
) -> float:
    away = [line[0] - start[0], line[1] - start[1]]
    loss = 0.5 * sum(away[i] * precision[i][j] * away[j] for i in (0, 1) for j in (0, 1))
    for predicted, outcome in some:
        p = 1 / (1 + math.exp(-line[0] * math.log(predicted / (1 - predicted)) - line[1]))
        loss -= 0.5 * (outcome * math.log(p) + (1 - outcome) * math.log(1 - p))
    return loss


def descend(start: tuple[float, float], precision: np.ndarray, some: Pairs) -> tuple[float, float]:
    """The minimum by ever smaller steps along each axis: slow and plain."""
    line, step = start, 1.0
    while step > 1e-9:
        tries = [(line[0] + a * step, line[1] + b * step) for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1))]
        best = min(tries, key=lambda t: platt_loss(t, start, precision, some))
        if platt_loss(best, start, precision, some) < platt_loss(line, start, precision, some):
            line = best
        else:
            step /= 2
    return line


def test_the_recalibration_is_the_minimum_found_by_a_slow_search() -> None:
    some = [(0.1, 0.0), (0.2, 1.0), (0.2, 0.5), (0.6, 1.0), (0.9, 1.0), (0.95, 0.0), (0.7, 1.0)]
    platt = Platt()
    platt.fit(*arrays(some), weight=0.5)
    first = descend((1.0, 0.0), PLATT_PRIOR * np.eye(2), some)
    assert (platt.slope, platt.shift) == pytest.approx(first, abs=1e-6)

    precision = PLATT_PRIOR * np.eye(2)
    for predicted, _ in some:
        x = math.log(predicted / (1 - predicted))
        p = 1 / (1 + math.exp(-first[0] * x - first[1]))
        precision += 0.5 * p * (1 - p) * np.array([[x * x, x], [x, 1.0]])
    keep, prior = PLATT_DISCOUNT, PLATT_PRIOR * np.eye(2)
    tempered = keep * precision + (1 - keep) * prior
    known = keep * precision @ np.array(first) + (1 - keep) * prior @ np.array([1.0, 0.0])
    start = np.linalg.solve(tempered, known)
    platt.fit(*arrays(some[:3]), weight=0.5)
    second = descend((float(start[0]), float(start[1])), tempered, some[:3])
    assert (platt.slope, platt.shift) == pytest.approx(second, abs=1e-6)


def test_overconfidence_and_pessimism_are_put_right() -> None:
    draws = np.random.default_rng(0)
    platt = Platt()
    for _ in range(20):
        logit = draws.normal(0.0, 1.0, 200)
        outcomes = (draws.random(200) < sigmoid(logit)).astype(float)
        platt.fit(sigmoid(2.0 * (logit - 0.5)), outcomes, weight=1.0)
    assert (platt.slope, platt.shift) == pytest.approx((0.5, 0.5), abs=0.1)
    assert platt.apply(sigmoid(np.array([1.0]))) == pytest.approx(sigmoid(np.array([1.0])), abs=0.05)


@given(pairs, st.integers(1, 400))
def test_whatever_the_outcomes_the_order_of_predictions_stays(some: Pairs, often: int) -> None:
    platt = Platt()
    predicted, outcomes = arrays(some * often)
    for _ in range(3):
        platt.fit(predicted, outcomes, weight=1.0)
    assert math.isfinite(platt.shift) and platt.slope >= 0.1
    after = platt.apply(np.array([0.1, 0.5, 0.9]))
    assert (np.diff(after) >= 0).all() and np.isfinite(after).all()


def test_meter_and_recalibration_come_back_from_their_states() -> None:
    meter, platt = Meter(), Platt()
    some = arrays([(0.1, 0.0), (0.35, 1.0), (0.8, 1.0)])
    meter.record(*some)
    platt.fit(*some, weight=1.0)
    states = msgpack.unpackb(msgpack.packb([meter.to_state(), platt.to_state()]))
    again, back = Meter.from_state(states[0]), Platt.from_state(states[1])
    for old, new in ((meter, again), (platt, back)):
        assert old.to_state() == new.to_state()
    meter.record(*some)
    again.record(*some)
    platt.fit(*some, weight=1.0)
    back.fit(*some, weight=1.0)
    assert (meter.to_state(), platt.to_state()) == (again.to_state(), back.to_state())
