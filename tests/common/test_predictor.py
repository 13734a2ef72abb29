"""The success predictor: a discounted Beta posterior per depth, in numbered versions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.predictor import DEPTH_BUCKETS, HistoryPredictor, Target, depth_bucket
from common.prefix import Prefix


def target(depth: int, outcome: float, predicted: float | None = 0.5) -> Target:
    return Target(Prefix(depth), predicted, outcome)


def test_before_any_outcome_the_odds_are_even_and_uncertain() -> None:
    before = HistoryPredictor().predict(Prefix(3))
    assert before.mean == 0.5 and before.std == pytest.approx(math.sqrt(1 / 12))  # the uniform distribution


def test_depths_share_buckets_that_double() -> None:
    assert [depth_bucket(d) for d in (0, 1, 2, 3, 4, 7, 8, 15, 16)] == [0, 1, 2, 2, 3, 3, 4, 4, 5]
    assert depth_bucket(1 << 40) == DEPTH_BUCKETS - 1


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0.0, 0.5, 1.0])), max_size=20), max_size=6
    )
)
def test_the_posterior_equals_a_plain_computation(waves: list[list[tuple[int, float]]]) -> None:
    predictor = HistoryPredictor(discount=0.9)
    counts = [[1.0, 1.0] for _ in range(DEPTH_BUCKETS)]
    for number, wave in enumerate(waves, start=1):
        counts = [[0.9 * a + 0.1, 0.9 * b + 0.1] for a, b in counts]
        for depth, outcome in wave:
            counts[depth_bucket(depth)][0] += outcome
            counts[depth_bucket(depth)][1] += 1 - outcome
        assert predictor.update([target(*item) for item in wave]) == number
    for depth in (0, 1, 2, 5, 9, 33):
        a, b = counts[depth_bucket(depth)]
        found = predictor.predict(Prefix(depth))
        assert found.mean == pytest.approx(a / (a + b))
        assert found.std == pytest.approx(math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1))))


def test_a_pinned_version_predicts_the_same_until_it_is_let_go() -> None:
    predictor = HistoryPredictor()
    predictor.pin(0)
    predictor.pin(0)
    predictor.update([target(0, 1.0)] * 10)
    assert predictor.predict(Prefix(0), 0).mean == 0.5 < predictor.predict(Prefix(0)).mean
    predictor.unpin(0)
    assert predictor.predict(Prefix(0), 0).mean == 0.5
    predictor.unpin(0)
    with pytest.raises(KeyError):
        predictor.predict(Prefix(0), 0)
    with pytest.raises(KeyError):
        predictor.pin(0)
    assert predictor.kept() == [1]


def test_versions_that_nobody_pins_are_not_kept() -> None:
    predictor = HistoryPredictor()
    for _ in range(50):
        predictor.update([target(1, 0.0)])
    assert predictor.kept() == [50]


def test_old_evidence_fades() -> None:
    predictor = HistoryPredictor(discount=0.5)
    predictor.update([target(0, 1.0)] * 100)
    for _ in range(12):
        predictor.update([])
    assert predictor.predict(Prefix(0)).mean == pytest.approx(0.5, abs=0.01)


def test_calibration_is_that_of_the_predictions_made_when_they_mattered() -> None:
    predictor = HistoryPredictor()
    assert predictor.brier is None
    predictor.update([target(0, 1.0, 0.75), target(0, 0.0, 0.5), target(1, 1.0, None)])
    assert predictor.brier == pytest.approx((0.25**2 + 0.5**2) / 2)
    predictor.update([])
    assert predictor.brier == pytest.approx((0.25**2 + 0.5**2) / 2)


def test_predictions_are_ever_closer_to_a_fixed_success_rate() -> None:
    predictor = HistoryPredictor()
    for _ in range(60):
        predictor.update([target(2, float(i % 5 == 0)) for i in range(50)])
    assert predictor.predict(Prefix(3)).mean == pytest.approx(0.2, abs=0.01)
