"""`trace`: the greedy heap against every possible allocation, and what it does where the paper is silent."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from allocator.rules.base import COMPLETE, WAIT, Decision, EventKind, Pick
from allocator.rules.trace import TraceRule, most_flips
from common.config_allocator import TraceRuleConfig
from common.errors import ConfigError
from common.nouns import ROOT, RewardSource
from common.predictor import Prediction
from common.prefix import Prefix
from tests.allocator.rules.garden import Garden, Hopeful, Told, World, run_apart, run_mixed

N = 2


def garden(allowance: int, per_root: int = N, **config: bool) -> Garden:
    return Garden(TraceRule(TraceRuleConfig(per_root=per_root, **config)), allowance)


def allocations(total: int, places: int) -> Iterator[tuple[int, ...]]:
    """Every way to put `total` continuations into `places`."""
    if places == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in allocations(total - first, places - 1):
            yield (first, *rest)


def flips(agreement: Sequence[float], started: Sequence[int], extra: Sequence[int]) -> float:
    """Σ 1 − q^K, the objective as it stands in the paper."""
    return sum(1 - q ** (k + more) for q, k, more in zip(agreement, started, extra, strict=True))


# --------------------------------------------------------------------------------------------- exactness


@pytest.mark.parametrize("seed", range(150))
def test_the_heap_finds_the_best_of_all_allocations(seed: int) -> None:
    """Random returns (some between 0 and 1), values and continuations that run already."""
    rng = random.Random(seed)
    g = garden(40, per_root=19)  # two rollouts
    tree, returns = g.tree, {}
    for _ in range(2):
        reward = rng.choice([0.0, 1.0, 0.25])
        for index in g.path([rng.choice([rng.random(), 0.0, 1.0]) for _ in range(rng.randint(1, 2))], reward):
            returns[index] = reward
    prefixes = [index for index in tree.anchors() if index != ROOT]
    started = [rng.randrange(3) for _ in prefixes]
    for index, count in zip(prefixes, started, strict=True):
        for _ in range(count):
            branch = g.start(index)
            if rng.random() < 0.5:
                g.turn(branch, 0.5)
                g.turn(branch, last=True)
                g.end(branch, 1.0)
    total = rng.randint(1, 6)
    tree.allowance = tree.spent + total
    g.forest.rule = TraceRule(TraceRuleConfig(per_root=tree.allowance))  # no more rollouts
    picks = Counter(pick.anchor for pick in g.decide().picks)
    assert picks.total() == total and set(picks) <= set(prefixes)
    values = [tree.predict(index).mean for index in prefixes]
    agreement = [returns[i] * v + (1 - returns[i]) * (1 - v) for i, v in zip(prefixes, values, strict=True)]
    chosen = [picks[index] for index in prefixes]
    best = max(flips(agreement, started, extra) for extra in allocations(total, len(prefixes)))
    assert flips(agreement, started, chosen) == pytest.approx(best, abs=1e-12)


def test_it_looks_for_surprises_and_not_for_the_greatest_variance() -> None:
    g = garden(3)
    unlikely, even = g.path([0.1, 0.5], 1.0)[:2]
    gains = {each.anchor: each.total for each in g.forest.rule.explain(g.tree)}
    assert gains == {unlikely: pytest.approx(0.9), even: pytest.approx(0.5)}
    assert [pick.anchor for pick in g.decide().picks] == [unlikely, even], "0.9, then 0.5 before 0.1 · 0.9"


def test_equal_gains_are_spread_even_when_nothing_can_flip() -> None:
    """The budget is there to be spent: where every q is 1, evenly."""
    g = garden(9)
    nodes = [index for _ in range(3) for index in g.path([1.0], 1.0)[:1]]
    assert [pick.anchor for pick in g.decide().picks] == nodes * 2
    assert most_flips(g.forest.rule.explain(g.tree), 0) == []


# ------------------------------------------------------------------------------------------ the two stages


@pytest.mark.parametrize("allowance", range(1, 14))
@pytest.mark.parametrize("per_root", [0, 1, 2, 5])
def test_of_an_allowance_one_part_starts_at_the_prompt_and_n_parts_below(
    allowance: int, per_root: int
) -> None:
    """Divisible or not: whole rollouts at the prompt, at least one, and all that is left at prefixes."""
    g = garden(allowance, per_root)
    first, *second = run_apart(g, World(5, dropped=0.0, longest=3))
    roots = max(1, allowance // (1 + per_root))
    assert first.picks == (Pick(ROOT),) * roots
    assert [len(decision.picks) for decision in second] == [allowance - roots] * (allowance > roots)


def test_nothing_starts_below_before_the_rollouts_have_ended() -> None:
    g = garden(6)
    (first, second) = g.grow(*g.decide().picks)
    assert g.decide() == WAIT
    g.turn(first, 0.2)
    g.turn(first, last=True)
    assert g.decide() == WAIT
    g.end(first, 1.0)
    assert len(g.decide().picks) == N, "its own share; the other rollout's comes with its end"
    g.grow(*g.decide().picks)
    assert g.decide() == WAIT
    g.turn(second, last=True)
    g.end(second, 0.0)
    assert len(g.decide().picks) == N


def test_a_share_without_a_candidate_waits_for_the_other_rollouts() -> None:
    g = garden(6)
    (first, second) = g.grow(*g.decide().picks)
    g.turn(first, last=True)
    g.end(first, 1.0)
    assert g.decide() == WAIT
    prefix = g.turn(second, 0.5)
    g.turn(second, last=True)
    g.end(second, 0.0)
    assert g.decide() == Decision(picks=(Pick(prefix),) * 4)


@pytest.mark.parametrize("reward", [1.0, None])
def test_where_every_rollout_ended_with_its_first_turn_or_was_dropped_the_rest_starts_at_the_prompt(
    reward: float | None,
) -> None:
    g = garden(7)
    for _ in range(2):
        g.path([] if reward is not None else [0.5], reward)
    assert g.decide() == Decision(picks=(Pick(ROOT),) * 5)


def test_a_dropped_rollout_has_no_candidates_and_the_others_get_its_share() -> None:
    g = garden(6)
    g.path([0.5, 0.5], None)
    kept = g.path([0.3], 1.0)[0]
    assert g.decide() == Decision(picks=(Pick(kept),) * 4)


def test_an_outcome_that_is_not_the_environments_is_no_return_to_compare_with() -> None:
    g = garden(6)
    judged = g.start()
    g.turn(judged, 0.5)
    g.turn(judged, last=True)
    g.end(judged, 1.0, RewardSource.PSEUDO_REWARD)
    kept = g.path([0.3], 0.0)[0]
    assert {pick.anchor for pick in g.decide().picks} == {kept}


def test_prefixes_below_a_continuation_that_started_below_are_no_candidates() -> None:
    g = garden(6)
    nodes = [*g.path([0.9], 1.0)[:1], *g.path([0.9], 1.0)[:1]]
    later = g.path([0.0, 0.0], 1.0, anchor=nodes[0])
    assert later[0] in g.tree.anchors(), "a surprise, had it been asked about"
    assert {pick.anchor for pick in g.decide().picks} <= set(nodes)


def test_a_dropped_continuation_does_not_count_and_one_that_runs_does() -> None:
    g = garden(30)
    a, b = (g.path([value], 1.0)[0] for value in (0.4, 0.5))
    assert g.decide().picks == (Pick(ROOT),) * 8, "ten rollouts of thirty continuations, two are there"
    for _ in range(8):
        g.path([], 1.0)
    g.drop(g.start(a))
    assert g.decide().picks[0].anchor == a
    g.start(a)
    gains = {each.anchor: each for each in g.forest.rule.explain(g.tree)}
    assert gains[a].total == pytest.approx(0.4 * 0.6) and gains[a].terms["started"] == 1
    assert g.decide().picks[0].anchor == b


def test_more_budget_in_the_end_is_allocated_again() -> None:
    g = garden(6)
    run_apart(g, World(2, dropped=0.0))
    assert g.decide() == COMPLETE
    g.tree.allowance = 8
    assert len(g.decide().picks) == 2


# ------------------------------------------------------------------------------------- which V is meant


def test_the_value_may_know_the_outcome_it_is_compared_with_or_not() -> None:
    """A success where 0.1 was predicted: a surprise of 0.9 by the prediction before, less by the one after."""
    for posterior, agreement in ((False, 0.1), (True, 0.1 + 0.5 * 0.9)):
        g = Garden(TraceRule(TraceRuleConfig(posterior=posterior)), 3, predictor=Belows())
        g.path([0.1], 1.0)
        (scored,) = g.forest.rule.explain(g.tree)
        assert scored.terms["agreement"] == pytest.approx(agreement)


class Belows(Told):
    """Told, and moved halfway to what came out below."""

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        told, below = super().predict(prefix).mean, prefix.below
        return Prediction(told if not below.trials else (told + below.wins / below.trials) / 2, 0.1)


def test_without_a_predictor_that_looks_at_outcomes_the_two_readings_are_one() -> None:
    decisions = []
    for posterior in (True, False):
        g = garden(12, posterior=posterior)
        decisions.append(run_apart(g, World(8)))
    assert decisions[0] == decisions[1]


# --------------------------------------------------------------------------------------------- at any time


@pytest.mark.parametrize("seed", range(40))
def test_asked_at_any_time_it_spends_its_budget_and_no_more_and_waits_only_for_something(seed: int) -> None:
    g = Garden(TraceRule(TraceRuleConfig(per_root=seed % 4)), 3 + seed % 9, predictor=Hopeful())

    def check(decision: Decision) -> None:
        assert len(decision.picks) <= g.tree.budget_left
        assert {pick.anchor for pick in decision.picks} <= set(g.tree.anchors())

    run_mixed(g, World(seed), seed, check)
    assert g.tree.budget_left == 0 and len(g.tree.branches) == 3 + seed % 9


def test_it_says_what_it_reads_and_its_constants_are_the_published_ones() -> None:
    rule = TraceRule(TraceRuleConfig())
    assert (
        rule.reads == {EventKind.NODE, EventKind.OUTCOME, EventKind.PREDICTOR} and rule.config.per_root == 2
    )
    with pytest.raises(ConfigError, match=r"allocator\.rule\.per_root must be 0 or more"):
        TraceRuleConfig(per_root=-1)


def test_it_explains_each_prefix_by_value_return_and_agreement_best_first() -> None:
    g = garden(6)
    assert [(each.anchor, each.terms) for each in g.forest.rule.explain(g.tree)] == [(ROOT, {"missing": 2.0})]
    g.path([0.9, 0.2], 0.0)
    g.path([0.6], 1.0)
    scored = g.forest.rule.explain(g.tree)
    assert all(a.total > b.total for a, b in pairwise(scored)) and len(scored) == 3
    assert scored[0].terms == {"value": 0.9, "return": 0.0, "agreement": pytest.approx(0.1), "started": 0.0}
    assert g.decide().picks[0].anchor == scored[0].anchor
