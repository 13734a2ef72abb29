"""Predictors that are told the hidden value are as good as they claim, and calibrated at any blur."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.population import POPULATIONS, Population, State, normal_cdf
from benchmarks.population_predictors import Blind, Noise, Sighted, blur_for, owens_t, root_auc
from common.prefix import Prefix

A = POPULATIONS["A"]


def prefixes(population: Population, count: int, turns: int = 0) -> tuple[dict[bytes, State], list[Prefix]]:
    """Open prefixes after as many turns, and the register of their states."""
    hidden, found = {}, []
    for prompt in range(count):
        state = population.root(prompt)
        for turn in range(turns):
            state = population.step(state, 31 * prompt + turn)
        seen = population.observables(state)
        hidden[seen.features] = state
        found.append(Prefix(depth=state.depth, features=seen.features))
    return hidden, found


def test_an_oracle_says_the_exact_value_and_is_certain() -> None:
    hidden, found = prefixes(A, 50, turns=2)
    oracle = Sighted(A, hidden, 0.0)
    for prefix in found:
        state = hidden[prefix.features or b""]
        assert oracle.predict(prefix).mean == pytest.approx(A.value(state), abs=1e-15)
        assert oracle.predict(prefix).std == 0


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("blur", [1.0, 4.0])
def test_a_blurred_predictor_is_calibrated_and_knows_how_unsure_it_is(blur: float, turns: int) -> None:
    hidden, found = prefixes(A, 4000, turns)
    predictor = Sighted(A, hidden, blur)
    said = [predictor.predict(prefix) for prefix in found]
    value = np.array([A.value(hidden[prefix.features or b""]) for prefix in found])
    mean, std = np.array([p.mean for p in said]), np.array([p.std for p in said])
    for band in (mean < 0.3, (mean >= 0.3) & (mean < 0.7), mean >= 0.7):
        off = (value - mean)[band]
        assert abs(off.mean()) < 4 * off.std() / math.sqrt(band.sum())
    assert np.mean((value - mean) ** 2) == pytest.approx(np.mean(std**2), rel=0.12)


def test_without_any_sight_only_the_law_of_the_population_is_left() -> None:
    hidden, found = prefixes(A, 20)
    blind = Sighted(A, hidden, 1e9)
    for prefix in found:
        assert blind.predict(prefix).mean == pytest.approx(A.mean_success, abs=1e-5)
    assert (Blind().predict(found[0]).mean, Blind().predict(found[0]).std) == (0.5, math.sqrt(1 / 12))


def test_noise_is_as_spread_as_the_truth_and_says_nothing_of_it() -> None:
    hidden, found = prefixes(A, 4000)
    noise = Noise(A, hidden)
    said = np.array([noise.predict(prefix).mean for prefix in found])
    value = np.array([A.value(hidden[prefix.features or b""]) for prefix in found])
    assert abs(np.corrcoef(said, value)[0, 1]) < 0.06
    assert (said.mean(), said.std()) == pytest.approx((value.mean(), value.std()), abs=0.03)
    assert noise.predict(found[0]) == noise.predict(found[0]), "it does not change its mind"


@pytest.mark.parametrize("population", POPULATIONS.values(), ids=POPULATIONS)
@pytest.mark.parametrize("blur", [0.0, 2.0, 9.0])
def test_the_area_under_the_curve_is_what_draws_show(population: Population, blur: float) -> None:
    draws = np.random.default_rng(5)
    z = population.centre + population.spread * draws.normal(size=40_000)
    won = draws.random(z.size) < np.vectorize(normal_cdf)(z)
    y = z + blur * draws.normal(size=z.size)
    rank = np.empty(z.size)
    rank[np.argsort(y)] = np.arange(z.size)
    wins = won.sum()
    area = (rank[won].sum() - wins * (wins - 1) / 2) / (wins * (z.size - wins))
    assert root_auc(population, blur) == pytest.approx(area, abs=0.012)


@pytest.mark.parametrize("level", [0.6, 0.8, 0.93])
def test_the_blur_of_a_level_has_that_level(level: float) -> None:
    assert root_auc(A, blur_for(A, level)) == pytest.approx(level, abs=1e-5)


def test_owens_function_agrees_with_its_closed_forms_and_its_integral() -> None:
    for h in (0.0, 0.4, -1.3, 3.0):
        assert owens_t(h, 1.0) == pytest.approx(normal_cdf(h) * normal_cdf(-h) / 2, abs=1e-9)
    for a in (0.1, 0.5, 0.9):
        assert owens_t(0.0, a) == pytest.approx(math.atan(a) / (2 * math.pi), abs=1e-9)
        x = np.linspace(0, a, 20_001)
        integral = np.trapezoid(np.exp(-0.5 * (1 + x**2)) / (1 + x**2), x) / (2 * math.pi)
        assert owens_t(1.0, a) == pytest.approx(float(integral), abs=1e-9)


def test_a_version_that_is_pinned_is_counted_until_it_is_let_go() -> None:
    predictor = Blind()
    predictor.pin(0)
    assert predictor.update([]) == 1 and predictor.pinned() == {0: 1}
    copy = Blind()
    copy.from_state(predictor.to_state())
    assert (copy.version, copy.pinned()) == (1, {0: 1})
    predictor.unpin(0)
    assert predictor.pinned() == {}
