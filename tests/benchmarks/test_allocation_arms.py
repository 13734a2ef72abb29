"""Arms keep their shape at every size, and what a predictor knows decides how well an arm does."""

from __future__ import annotations

from itertools import islice, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.allocation_arms import BUDGETS, RULES, Arm, Bench, Length, auc
from benchmarks.contrast import Sums
from benchmarks.population import POPULATIONS
from common.config_allocator import (
    AllocatorConfig,
    EntropyRuleConfig,
    RandomRuleConfig,
    UucbRuleConfig,
    check_allocator,
)

A, C = POPULATIONS["A"], POPULATIONS["C"]
SHORT = Length(batch=8, warm=2, burn_in=1, waves=2)


def contrast(bench: Bench, arm: Arm, seeds: int, size: int = 12) -> float:
    total = Sums()
    for seed in range(seeds):
        total = total.plus(bench.grow(A, arm, size, seed)[0])
    return total.ratios()["contrast"]


@pytest.mark.parametrize("rule, budget", list(product(RULES, BUDGETS)))
def test_every_size_of_an_arm_is_a_configuration_that_the_allocator_takes(rule: str, budget: str) -> None:
    arm = Arm(rule, budget)
    for size in islice(arm.sizes(), 8):
        config = AllocatorConfig(rule=arm.rule_config(size), budget=arm.budget_config(size))
        check_allocator(config, 8)
        assert config.budget.continuations == size


def test_shapes_are_those_of_the_papers_at_their_own_sizes() -> None:
    arpo, at2po, random = (
        Arm(rule).rule_config(size) for rule, size in (("arpo", 16), ("at2po", 22), ("random", 6))
    )
    assert isinstance(arpo, EntropyRuleConfig) and (arpo.form, arpo.initial) == ("arpo", 8)
    assert isinstance(at2po, EntropyRuleConfig) and (at2po.initial, at2po.beam) == (10, 6)
    assert isinstance(random, RandomRuleConfig) and (random.chains, random.expansions) == (2, 2)


def test_weights_go_to_the_rule_that_has_them() -> None:
    config = Arm("uucb", weights=(2.0, 0.5, 0.25)).rule_config(16)
    assert isinstance(config, UucbRuleConfig)
    assert (config.value, config.exploration, config.entropy) == (2.0, 0.5, 0.25)


@pytest.mark.parametrize("rule, budget", list(product(RULES, BUDGETS)))
def test_every_rule_runs_with_every_budget_and_spends_it(rule: str, budget: str) -> None:
    sums, _ = Bench(SHORT).grow(C, Arm(rule, budget), 6, seed=1)
    assert sums.prompts == SHORT.batch * SHORT.waves
    leaves = sums.ratios()["leaves"]
    if rule in ("patr", "igrpo"):
        assert leaves > 6, "paths are split"
    elif budget == "adaptive":
        assert 6 <= leaves <= 6 * 1.05 * (SHORT.waves + SHORT.burn_in) / SHORT.waves
    else:
        assert leaves == 6


def test_what_is_known_decides_an_oracle_before_the_learned_before_noise() -> None:
    bench = Bench(Length(batch=16, warm=4, burn_in=0, waves=2))
    found = {
        name: contrast(bench, Arm("trace", "trace_roots", name), seeds=2)
        for name in ("oracle", "shared", "noise")
    }
    assert found["oracle"] > found["shared"] + 0.1 > found["noise"] + 0.2, found


def test_runs_of_one_seed_are_the_same_and_of_another_are_not() -> None:
    def run(seed: int) -> Sums:
        return Bench(SHORT).grow(A, Arm("trace", "trace_roots"), 6, seed)[0]

    assert run(4) == run(4)
    assert run(4) != run(5)


def test_an_arm_that_learns_nothing_meets_the_prompts_of_one_that_does() -> None:
    bench = Bench(SHORT)
    learns, flat = Arm("flat", "adaptive"), Arm("flat", predictor="none")
    assert learns.learns and not flat.learns
    roots = [
        [value for value, _ in bench.grow(A, arm, 2, seed=3)[1].roots]
        for arm in (Arm("flat", "adaptive", "oracle"), Arm("flat", "fixed", "oracle"))
    ]
    assert set(roots[1]) <= set(roots[0]), "the same prompts have the same hidden values"


def literal_auc(pairs: list[tuple[float, bool]]) -> float | None:
    wins, losses = ([value for value, won in pairs if won is which] for which in (True, False))
    if not wins or not losses:
        return None
    return sum((a > b) + 0.5 * (a == b) for a in wins for b in losses) / (len(wins) * len(losses))


@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.5, 0.9]), st.booleans()), max_size=12))
def test_the_area_under_the_curve_is_the_share_of_pairs_in_the_right_order(
    pairs: list[tuple[float, bool]],
) -> None:
    expected = literal_auc(pairs)
    assert auc(pairs) == (None if expected is None else pytest.approx(expected))
