"""What the shared predictor sees of a prefix: absent is not zero, and nothing drowns the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.predictor_inputs import (
    COLUMNS,
    DESCRIBED,
    FIXED,
    MAX_WIDTH,
    ODDS,
    SEEN,
    Scale,
    array,
    elsewhere,
    encode,
    fixed_columns,
    plain,
    vector,
    width_of,
)
from common.prefix import Prefix, Tally


def packed(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_the_columns_are_those_of_the_picture() -> None:
    reach = math.log(4)
    prefix = Prefix(3, process_score=0.75, entropy=0.4, tokens=2)
    assert fixed_columns(prefix) == pytest.approx(
        [1, 1, reach, reach**2 / 4, 1, 1.0, 1.0, reach, 1, 0.4, math.log(3), 0]
    )
    assert fixed_columns(Prefix(0)) == [1.0] + [0.0] * (FIXED - 1)


def test_a_missing_value_differs_from_a_zero() -> None:
    assert fixed_columns(Prefix(1, process_score=0.0)) != fixed_columns(Prefix(1))
    assert fixed_columns(Prefix(1, entropy=0.0)) != fixed_columns(Prefix(1))
    rows = encode([Prefix(1, features=packed(0, 0)), Prefix(1)], 2)
    assert rows.columns[:, DESCRIBED].tolist() == [1.0, 0.0]


def test_outcomes_at_the_prefix_are_not_counted_elsewhere_too() -> None:
    at = Tally(2.0, 3)
    assert elsewhere(Prefix(0, tree=at, below=at)) == (0.0, 0.0)
    assert elsewhere(Prefix(2, tree=Tally(2.5, 6), below=at)) == pytest.approx(
        (math.log(1.5 / 3.5), math.log(4))
    )
    # Sums of fractions may differ in the last bit from their parts.
    assert elsewhere(Prefix(2, tree=Tally(0.1 + 0.2, 2), below=Tally(0.3 + 1e-15, 2))) == (0.0, 0.0)


def test_a_row_holds_all_of_it() -> None:
    prefix = Prefix(1, 0.5, 0.1, 3, packed(1, 2, 3), Tally(1.0, 4), Tally(1.0, 1))
    rows = encode([prefix], 2)
    assert rows.columns.shape == (1, COLUMNS) and rows.features.tolist() == [[1.0, 2.0]]
    assert (rows.columns[0, ODDS], rows.columns[0, SEEN]) == pytest.approx((math.log(1 / 4), math.log(4)))
    assert (rows.wins.tolist(), rows.trials.tolist()) == ([1.0], [1.0])
    assert rows.reach.tolist() == [math.log(2)]
    assert encode([], 2).design(Scale.unknown(2)).shape == (0, COLUMNS + 2)


@pytest.mark.parametrize(
    "features",
    [None, b"", packed(1.0), packed(math.nan, 1.0), packed(1.0, math.inf), packed(1e30, 0.0)],
    ids=["none", "empty", "short", "no number", "infinite", "huge"],
)
def test_a_vector_that_cannot_be_used_is_missing(features: bytes | None) -> None:
    assert vector(features, 2) is None
    assert encode([Prefix(1, features=features)], 2).columns[0, DESCRIBED] == 0.0


def test_of_a_wide_vector_the_first_values_are_used() -> None:
    wide = packed(*range(100))
    assert width_of([Prefix(0, features=wide)]) == MAX_WIDTH
    found = vector(wide, MAX_WIDTH)
    assert found is not None and found.tolist() == list(range(MAX_WIDTH))


def test_the_width_is_that_of_most_vectors() -> None:
    odd = Prefix(0, features=packed(1.0))
    usual = Prefix(0, features=packed(1.0, 2.0, 3.0))
    assert width_of([odd, usual, usual, Prefix(0)]) == 3
    assert width_of([Prefix(0), Prefix(1)]) == 0


def test_the_scale_is_that_of_all_vectors_with_older_ones_fading() -> None:
    draws = np.random.default_rng(0)
    first, second = draws.normal(3.0, 2.0, (40, 3)), draws.normal(-1.0, 0.5, (60, 3))
    scale = Scale.unknown(3).after(first, 0.9)
    assert scale.mean == pytest.approx(first.mean(0)) and scale.std == pytest.approx(first.std(0))
    weights = np.array([0.9] * 40 + [1.0] * 60)
    both = np.concatenate([first, second])
    scale = scale.after(second, 0.9)
    mean = np.average(both, axis=0, weights=weights)
    assert scale.mean == pytest.approx(mean)
    assert scale.std == pytest.approx(np.sqrt(np.average((both - mean) ** 2, axis=0, weights=weights)))
    assert scale.after(np.zeros((0, 3)), 0.9) is scale


def test_a_feature_that_never_varies_says_nothing() -> None:
    scale = Scale.unknown(1).after(np.full((50, 1), 7.3), 0.9)
    assert np.abs(scale.standardised(np.array([[7.3]]))).max() < 1e-3


def test_a_feature_far_out_is_cut() -> None:
    scale = Scale.unknown(1).after(np.array([[-1.0], [1.0]]), 0.9)
    assert scale.standardised(np.array([[-99.0], [0.5], [99.0]])).ravel().tolist() == [-5.0, 0.5, 5.0]


def test_arrays_and_scales_come_back_bit_for_bit() -> None:
    values = np.array([0.1, -0.0, 1e-300, 1 / 3])
    assert array(plain(values)).tobytes() == values.tobytes()
    scale = Scale.unknown(2).after(np.array([[0.1, 0.2], [0.3, 7.0]]), 0.9)
    assert Scale.from_state(scale.to_state()).std.tobytes() == scale.std.tobytes()
    with pytest.raises(ValueError):
        array(b"123")
