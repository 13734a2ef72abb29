"""Samples for prompts out of one sum, against plain enumeration and against all other allocations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from allocator.budgets.roots import Contrast, allocate_roots, chance_of_contrast

VALUES = st.sampled_from([0.0, 0.02, 0.1, 0.3, 0.5, 0.62, 0.9, 1.0]) | st.floats(0, 1)


def enumerated(value: float, samples: int) -> float:
    """P(both outcomes), over all outcomes of the samples."""
    total = 0.0
    for outcomes in itertools.product((0, 1), repeat=samples):
        if 0 < sum(outcomes) < samples:
            total += math.prod(value if won else 1 - value for won in outcomes)
    return total


def exactly(a: Fraction, b: Fraction, samples: int) -> Fraction:
    """1 − E[p^m] − E[(1−p)^m] under Beta(a, b), by the product formula."""

    def power(first: Fraction, second: Fraction) -> Fraction:
        return math.prod(
            ((first + j) / (first + second + j) for j in range(samples)), start=Fraction(1)
        )  # E[p^k] = Π (a+j)/(a+b+j)

    return 1 - power(a, b) - power(b, a) if samples else Fraction(0)


def allocations(prompts: int, total: int) -> Iterator[tuple[int, ...]]:
    """All there are: each 0, or 2 and more, in sum at most `total`."""
    if prompts == 0:
        yield ()
        return
    for samples in (0, *range(2, total + 1)):
        for rest in allocations(prompts - 1, total - samples):
            yield (samples, *rest)


def worth(
    values: list[float], samples: tuple[int, ...] | list[int], stds: list[float] | None = None
) -> float:
    stds = stds or [0.0] * len(values)
    return sum(chance_of_contrast(v, m, s) for v, m, s in zip(values, samples, stds, strict=True))


# ------------------------------------------------------------------------------------------------ V itself


@pytest.mark.parametrize("value", [0.0, 0.1, 0.37, 0.5, 0.8, 1.0])
def test_the_chance_of_both_outcomes_is_that_of_counting_all_of_them(value: float) -> None:
    for samples in range(9):
        assert chance_of_contrast(value, samples) == pytest.approx(enumerated(value, samples), abs=1e-12)


@pytest.mark.parametrize("a, b", [(1, 1), (2, 3), (7, 1), (Fraction(1, 2), Fraction(1, 3))])
def test_an_uncertain_prediction_counts_by_its_mean_over_the_beta_exactly(a: Fraction, b: Fraction) -> None:
    a, b = Fraction(a), Fraction(b)
    mean = a / (a + b)
    std = math.sqrt(mean * (1 - mean) / (a + b + 1))
    for samples in range(12):
        expected = float(exactly(a, b, samples))
        assert chance_of_contrast(float(mean), samples, std) == pytest.approx(expected, abs=1e-12)


def test_uniform_beliefs_give_one_minus_two_over_m_plus_one() -> None:
    """∫ 1 − p^m − (1−p)^m dp = 1 − 2/(m+1), where the mean alone would say 1 − 2^(1−m)."""
    for samples in range(2, 10):
        assert chance_of_contrast(0.5, samples, math.sqrt(1 / 12)) == pytest.approx(1 - 2 / (samples + 1))
        assert chance_of_contrast(0.5, samples) == pytest.approx(1 - 2 ** (1 - samples))


@given(value=st.floats(0, 1), share=st.floats(0, 0.99), samples=st.integers(2, 12))
def test_uncertainty_never_adds_contrast_and_gains_never_grow(
    value: float, share: float, samples: int
) -> None:
    std = share * math.sqrt(value * (1 - value))
    assert chance_of_contrast(value, samples, std) <= chance_of_contrast(value, samples) + 1e-12
    contrast = Contrast.of(value, std)
    gains = [contrast.take() for _ in range(12)]
    assert all(later <= earlier + 1e-15 for earlier, later in itertools.pairwise(gains[1:]))
    assert gains[1] <= gains[0]


def test_a_prediction_that_could_be_anything_at_all_expects_no_contrast() -> None:
    """As uncertain as a mean allows: the prompt always or never succeeds."""
    assert chance_of_contrast(0.3, 50, math.sqrt(0.21)) == pytest.approx(0, abs=1e-9)
    assert chance_of_contrast(0.3, 50, 2.0) == 0


# ----------------------------------------------------------------------------------------------- the traps


def test_the_first_sample_gains_nothing_and_yet_nobody_stands_still() -> None:
    assert enumerated(0.5, 1) == 0
    assert allocate_roots([0.5, 0.5, 0.5], 6) == [2, 2, 2]


def test_a_third_sample_gains_as_much_as_each_of_the_pair_did() -> None:
    for value in (0.1, 0.3, 0.5):
        contrast = Contrast(value)
        pair = contrast.take()
        assert contrast.next == pair / 2 == value * (1 - value)
        contrast.take()
        assert contrast.next < pair / 2
    uncertain = Contrast.of(0.3, 0.2)
    assert uncertain.take() / 2 == uncertain.next


@pytest.mark.parametrize("values, total, expected", [
    ([0.5, 0.5], 5, [3, 2]),
    ([0.5, 0.01], 4, [4, 0]),                  # a hopeless pair gains less than a third and a fourth sample
    ([0.5, 0.01], 40, [8, 32]),
    ([0.5, 0.2764], 4, [2, 2]),                # v(1−v) = 0.25 and 0.2: not third and fourth of the first
    ([0.5, 0.2764], 3, [3, 0]),
    ([0.0, 1.0], 8, [0, 0]),                   # nothing to gain, nothing spent
    ([0.5], 1, [0]), ([], 5, []), ([0.5, 0.5], 0, [0, 0]),
])  # fmt: skip
def test_small_allocations_are_those_worked_out_by_hand(
    values: list[float], total: int, expected: list[int]
) -> None:
    assert allocate_roots(values, total) == expected


@pytest.mark.parametrize("values, stds, total, places, expected", [
    ([0.9, 0.5, 0.1, 0.4], None, 8, 2, [0, 4, 0, 4]),
    ([0.9, 0.5, 0.1, 0.4], None, 9, 2, [0, 4, 0, 5]),
    ([0.0, 1.0, 0.0], None, 7, 2, [4, 3, 0]),              # all are hopeless: the first ones, evenly
    ([0.5, 0.5], [0.28, 0.05], 6, 1, [0, 6]),               # the same mean, one of them known
    ([0.5, 0.45], [0.45, 0.0], 9, 2, [3, 6]),
    ([0.3, 0.3, 0.3], None, 9, 3, [3, 3, 3]),
    ([0.5], None, 0, 0, [0]),
])  # fmt: skip
def test_places_are_filled_with_the_prompts_in_doubt_and_the_sum_is_spent_to_the_last(
    values: list[float], stds: list[float] | None, total: int, places: int, expected: list[int]
) -> None:
    assert allocate_roots(values, total, places, stds, fill=True) == expected


# ------------------------------------------------------------------------------- against all allocations


@given(values=st.lists(VALUES, max_size=4), total=st.integers(0, 9), places=st.none() | st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_no_allocation_of_certain_values_is_better(
    values: list[float], total: int, places: int | None
) -> None:
    found = allocate_roots(values, total, places)
    most = len(values) if places is None else places
    assert found in [list(a) for a in allocations(len(values), total)]
    assert sum(samples > 0 for samples in found) <= most
    allowed = [a for a in allocations(len(values), total) if sum(m > 0 for m in a) <= most]
    assert worth(values, found) >= max(worth(values, a) for a in allowed) - 1e-12


@given(data=st.data(), values=st.lists(VALUES, min_size=1, max_size=5), more=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_no_way_to_fill_the_places_is_better(data: st.DataObject, values: list[float], more: int) -> None:
    places = data.draw(st.integers(1, min(3, len(values))))
    total = 2 * places + more
    found = allocate_roots(values, total, places, fill=True)
    filling = [
        a
        for a in allocations(len(values), total)
        if sum(a) == total and sum(samples > 0 for samples in a) == places
    ]
    assert tuple(found) in filling
    assert worth(values, found) >= max(worth(values, a) for a in filling) - 1e-12


@given(data=st.data(), values=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=5), more=st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_with_uncertain_values_at_most_a_hundredth_is_lost(
    data: st.DataObject, values: list[float], more: int
) -> None:
    shares = data.draw(st.lists(st.floats(0, 0.95), min_size=len(values), max_size=len(values)))
    stds = [share * math.sqrt(v * (1 - v)) for v, share in zip(values, shares, strict=True)]
    places = data.draw(st.integers(1, min(3, len(values))))
    total = 2 * places + more
    found = allocate_roots(values, total, places, stds, fill=True)
    filling = [
        a
        for a in allocations(len(values), total)
        if sum(a) == total and sum(samples > 0 for samples in a) == places
    ]
    assert tuple(found) in filling
    assert worth(values, found, stds) >= 0.99 * max(worth(values, a, stds) for a in filling)


@given(values=st.lists(st.floats(0.05, 0.95), min_size=2, max_size=40), mean=st.integers(2, 20))
def test_no_sample_would_gain_more_elsewhere(values: list[float], mean: int) -> None:
    samples = allocate_roots(values, mean * len(values), len(values), fill=True)
    assert sum(samples) == mean * len(values)
    assume(min(samples) > 2)
    lasts, nexts = [], []
    for value, count in zip(values, samples, strict=True):
        contrast = Contrast(value)
        gains = [contrast.take() for _ in range(count - 1)]
        lasts.append(gains[-1])
        nexts.append(contrast.next)
    assert max(nexts) <= min(lasts) + 1e-12


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("values, stds, words", [
    ([1.2], None, "mean in [0, 1]"), ([float("nan")], None, "mean in [0, 1]"), ([0.5], [-0.1], "std of 0 or more"),
])  # fmt: skip
def test_what_is_no_probability_is_refused(values: list[float], stds: list[float] | None, words: str) -> None:
    with pytest.raises(ValueError) as error:
        allocate_roots(values, 4, uncertainty=stds)
    assert words in str(error.value)


@pytest.mark.parametrize("places, total", [(4, 20), (3, 5)])
def test_places_that_cannot_be_filled_are_refused(places: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{places} places cannot be filled with 2 of {total} samples"):
        allocate_roots([0.5, 0.5, 0.5], total, places, fill=True)


def test_a_thousand_prompts_take_no_time_worth_mentioning() -> None:
    values = [(i * 37 % 1000) / 1000 for i in range(1000)]
    samples = allocate_roots(values, 4096, 512, [0.1] * 1000, fill=True)
    assert sum(samples) == 4096 and sum(m > 0 for m in samples) == 512
