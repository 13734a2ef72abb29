"""The populations have the papers' flat rates, exactly, and their values are martingales, exactly."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.population import (
    FEATURES,
    POPULATIONS,
    VIEWS,
    Population,
    State,
    calibrate,
    mixed_rate,
    normal_cdf,
)

EVERY = pytest.mark.parametrize("population", POPULATIONS.values(), ids=POPULATIONS)
GRID = np.linspace(-12.0, 12.0, 20_001)
DENSITY = np.exp(-0.5 * GRID**2) / np.exp(-0.5 * GRID**2).sum()
PHI = np.vectorize(normal_cdf)


def path(population: Population, prompt: int, seed: int) -> list[State]:
    """An episode from its root to its end."""
    states = [population.root(prompt)]
    while states[-1].success is None:
        states.append(population.step(states[-1], seed + 1000 * len(states)))
    return states


@EVERY
def test_flat_sampling_has_the_rate_of_the_paper_and_the_frozen_constants_are_its_solution(
    population: Population,
) -> None:
    p = PHI(population.centre + population.spread * GRID)
    rate = ((1 - p**population.group - (1 - p) ** population.group) * DENSITY).sum()
    assert rate == pytest.approx(population.flat_rate, abs=1e-6)
    assert population.mixed(population.group) == pytest.approx(rate, abs=1e-9)
    assert (p * DENSITY).sum() == pytest.approx(population.mean_success, abs=1e-6)
    centre, spread = calibrate(population.flat_rate, population.group, population.mean_success)
    assert (population.centre, population.spread) == pytest.approx((centre, spread), abs=1e-6)


def test_the_rates_are_those_that_the_papers_report() -> None:
    rates = {name: (each.flat_rate, each.group) for name, each in POPULATIONS.items()}
    assert rates == {"A": (0.268, 12), "B": (0.347, 12), "C": (0.581, 16)}


def test_a_prompt_that_is_always_even_is_mixed_unless_all_outcomes_agree() -> None:
    assert mixed_rate(0.0, 1e-9, 3) == pytest.approx(1 - 2 / 8)


@EVERY
@pytest.mark.parametrize("z", [-6.0, -1.5, -0.2, 0.0, 0.7, 3.0])
def test_the_value_is_the_mean_of_the_values_one_turn_later_whether_the_turn_is_the_last_or_not(
    population: Population, z: float
) -> None:
    c = population.reveal
    later = (PHI((z + math.sqrt(c) * GRID) / math.sqrt(1 - c)) * DENSITY).sum()
    assert later == pytest.approx(normal_cdf(z), abs=1e-9)
    assert ((z + GRID > 0) * DENSITY).sum() == pytest.approx(normal_cdf(z), abs=1e-3), "the last turn"


@EVERY
@pytest.mark.parametrize("depth", [0, 4])
def test_steps_as_drawn_keep_the_mean_of_the_value_at_prefixes_of_any_depth(
    population: Population, depth: int
) -> None:
    start = population.root(3)._replace(depth=depth, probit=0.3)
    values = [population.value(population.step(start, seed)) for seed in range(6000)]
    error = np.std(values) / math.sqrt(len(values))
    assert abs(np.mean(values) - population.value(start)) < 4 * error
    assert error > 0.001, "turns move the value"


@EVERY
def test_the_number_of_turns_is_uniform_between_its_bounds(population: Population) -> None:
    alive, chances = Fraction(1), []
    for depth in range(1, population.max_turns + 1):
        hazard = Fraction(population.hazard(depth)).limit_denominator(100)
        chances.append(alive * hazard)
        alive *= 1 - hazard
    short, few = population.min_turns - 1, population.max_turns + 1 - population.min_turns
    assert chances == [0] * short + [Fraction(1, few)] * few
    assert {len(path(population, prompt, prompt)) - 1 for prompt in range(300)} == set(
        range(population.min_turns, population.max_turns + 1)
    )


@EVERY
def test_probits_of_open_prefixes_follow_the_law_of_their_depth(population: Population) -> None:
    found: dict[int, list[float]] = {}
    for prompt in range(2500):
        for state in path(population, prompt, 7 * prompt)[:-1]:
            found.setdefault(state.depth, []).append(state.probit)
    for depth in (0, 1, 3):
        mean, spread = population.law(depth)
        error = spread / math.sqrt(len(found[depth]))
        assert abs(np.mean(found[depth]) - mean) < 4 * error, depth
        assert np.std(found[depth]) == pytest.approx(spread, rel=0.08), depth


def test_a_path_depends_on_population_prompt_and_seeds_and_on_nothing_else() -> None:
    a, b = POPULATIONS["A"], POPULATIONS["B"]
    assert path(a, 5, 17) == path(a, 5, 17)
    assert path(a, 5, 17)[1].probit != path(a, 5, 18)[1].probit
    assert a.root(5) != a.root(6)
    assert a.root(5).probit != b.root(5).probit
    assert a.observables(a.root(5)) == a.observables(a.root(5))


def test_siblings_are_independent_draws_and_are_seen_apart() -> None:
    population = POPULATIONS["C"]
    root = population.root(1)
    first, second = (population.step(root, seed) for seed in (1, 2))
    assert first.probit != second.probit
    assert population.observables(first).features != population.observables(second).features


def test_what_is_seen_of_a_state_says_something_of_its_value_and_does_not_give_it_away() -> None:
    population = POPULATIONS["A"]
    roots = [population.root(prompt) for prompt in range(3000)]
    seen = [population.observables(root) for root in roots]
    views = np.array([struct.unpack(f"<{FEATURES}f", each.features) for each in seen])
    z = np.array([root.probit for root in roots])
    off = views[:, :VIEWS].mean(1) - z
    assert np.std(off) == pytest.approx(math.hypot(population.prompt_noise, population.node_noise), rel=0.06)
    assert abs(np.corrcoef(off, z)[0, 1]) < 0.06
    assert max(abs(np.corrcoef(views[:, VIEWS:].T, z)[-1, :-1])) < 0.06, "the other features are noise"
    assert np.corrcoef([each.process_score for each in seen], z)[0, 1] > 0.3
    assert all(0 <= each.process_score <= 1 and each.entropy > 0 for each in seen)
    openness = np.array([population.value(root) * (1 - population.value(root)) for root in roots])
    assert np.corrcoef([each.entropy for each in seen], openness)[0, 1] > 0.5


def test_the_views_of_a_prompts_tree_share_most_of_their_error() -> None:
    population = POPULATIONS["A"]
    first, second = [], []
    for prompt in range(1500):
        root = population.root(prompt)
        child = population.step(root, prompt)
        for state, found in ((root, first), (child, second)):
            view = struct.unpack(f"<{FEATURES}f", population.observables(state).features)[0]
            found.append(view - state.probit)
    shared = population.prompt_noise**2 / (population.prompt_noise**2 + population.node_noise**2)
    assert np.corrcoef(first, second)[0, 1] == pytest.approx(shared, abs=0.05)


def test_nobody_steps_beyond_the_end_of_an_episode() -> None:
    population = POPULATIONS["A"]
    with pytest.raises(ValueError, match="is over"):
        population.step(path(population, 0, 0)[-1], 1)
