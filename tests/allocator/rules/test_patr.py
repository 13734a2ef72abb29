"""PATR against a slow literal search, and its scoring point by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.rules.base import COMPLETE, WAIT, EventKind
from allocator.rules.patr import PatrRule
from common.config_allocator import PatrRuleConfig
from common.errors import ConfigError
from common.messages import Bye, Capabilities
from common.nouns import NO_LEASE, RewardSource
from tests.allocator.harness import Rig, hello, small
from tests.allocator.rules.level_search import LevelSearch, assert_same
from tests.allocator.rules.levels import Level, grow

PAPER = PatrRuleConfig()
EAGER = PatrRuleConfig(interval=2, top_k=2, children=3, margin=0.25, repeats=3)
"""Stops for both reasons, and splits, in the toy world."""


def answers(view: Level, config: PatrRuleConfig = PAPER) -> list[int]:
    """Heirs of each path, by number; 0 = stopped."""
    decision = PatrRule(config).decide(view)
    stopped = {stop.number for stop in decision.stops}
    heirs = [sum(pick.heir_of == number for pick in decision.picks) for number in view.branches]
    assert all((count == 0) == (n in stopped) for n, count in zip(view.branches, heirs, strict=True))
    return heirs


def scored(*scores: float | None) -> Level:
    return Level([[(0.5, "up"), (score, f"a{place}")] for place, score in enumerate(scores)])


# ------------------------------------------------------------------------------------------- whole trees


@pytest.mark.parametrize("config", [PAPER, EAGER], ids=["paper", "eager"])
@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faulty"])
def test_whole_trees_equal_a_plain_search_whatever_the_order_of_arrival(
    config: PatrRuleConfig, faults: bool
) -> None:
    for seed in range(12):
        runs = LevelSearch(config, 4, seed, faults=faults).tree(0, 0)
        for order in range(3):
            tree, _ = grow(config, 4, seed, order, faults=faults)
            if tree is None:
                assert all(run.reward is None for run in runs)
                break
            assert_same(tree, runs)


def test_the_toy_world_shows_every_answer_of_a_scoring_point() -> None:
    """Otherwise the comparison above would prove little."""
    ended, heirs = set[str](), set[int]()
    for seed in range(12):
        for run in LevelSearch(EAGER, 4, seed, faults=True).tree(0, 0):
            ended.add(run.ended)
            heirs.add(len(run.heirs))
    assert ended == {"finished", "horizon", "stopped", "dropped: broken"} and heirs == {0, 1, 3}


@pytest.mark.parametrize("staleness", [0, 3, 100])
def test_a_scoring_point_waits_for_its_level_at_any_score_staleness_and_its_heirs_are_never_stale(
    staleness: int,
) -> None:
    for seed in range(6):
        tree, rig = grow(EAGER, 4, seed, 0, staleness=staleness)
        assert tree is not None
        assert_same(tree, LevelSearch(EAGER, 4, seed).tree(0, 0))
        assert rig.stat("leases/score_age_max") == 0 and rig.stat("leases/speculative_share") == 0
        assert rig.stat("events/given_back") == 0


def test_leaves_weigh_what_was_planned_and_heirs_cost_no_budget() -> None:
    for seed in range(12):
        tree, _ = grow(EAGER, 4, seed, 0, faults=True)
        assert tree is not None
        assert sum(c.heir_of == NO_LEASE for c in tree.continuations) == 4
        continued = {c.heir_of for c in tree.continuations}
        ends = [c.weight for c in tree.continuations if c.number not in continued]
        assert sum(ends) == pytest.approx(tree.planned_weight) == pytest.approx(1.0)


def test_trajectories_that_a_budget_adds_later_run_to_scoring_points_of_their_own() -> None:
    rule = PatrRule(PAPER)
    view = Level([[(0.5, "up")]], ended={0: "finished"})
    assert rule.decide(view) == COMPLETE
    view.budget_left = 2
    picks = rule.decide(view).picks
    assert [(pick.group, pick.horizon, pick.heir_of) for pick in picks] == [
        (1, 5, NO_LEASE),
        (2, 5, NO_LEASE),
    ]


# --------------------------------------------------------------------------------------- a scoring point


def test_the_best_two_are_split_the_hopeless_stopped_and_the_rest_go_on_as_they_were() -> None:
    assert answers(scored(0.9, 0.2, 0.8, 0.7)) == [2, 0, 2, 1]


def test_the_median_of_an_even_number_is_the_mean_of_the_two_in_the_middle() -> None:
    # Median 0.75: the lower middle score, 0.5, would keep the path at 0.125.
    assert answers(scored(0.125, 0.5, 1.0, 1.0), PatrRuleConfig(margin=0.5)) == [0, 1, 2, 2]


def test_a_path_exactly_at_the_bar_goes_on() -> None:
    assert answers(scored(0.25, 0.75, 0.75)) == [1, 2, 2]
    assert answers(scored(0.24, 0.75, 0.75)) == [0, 2, 2]


def test_the_scores_of_paths_about_to_be_stopped_count_for_the_median() -> None:
    # Without the two stuck at 0 the median were 1, and the path at 0.375 stopped.
    stuck = [[(1.0, "left")] * 5 + [(0.0, "left")]] * 2
    free = [[(1.0, f"a{k}") for k in range(5)] + [(score, "end")] for score in (0.375, 1.0, 1.0)]
    assert answers(Level(stuck + free)) == [0, 0, 1, 2, 2]


def test_of_equal_scores_the_path_with_the_lower_number_is_split() -> None:
    assert answers(scored(0.5, 0.5, 0.5, 0.5)) == [2, 2, 1, 1]


def test_fewer_survivors_than_k_are_all_split_and_a_stopped_path_never_is() -> None:
    stuck = [(0.9, "left")] * 6
    free = [*stuck[:5], (0.8, "up")]
    assert answers(Level([stuck, free])) == [0, 2]
    assert answers(Level([stuck])) == [0]
    assert answers(Level([free])) == [2]


@pytest.mark.parametrize(
    "actions, stopped",
    [
        ("llllll", True),
        ("rllllll", True),
        ("lllll", False),
        ("llllllr", False),  # it left its loop
        ("lllrlll", False),
    ],
)
def test_only_a_path_whose_newest_actions_are_all_the_same_is_stuck(actions: str, stopped: bool) -> None:
    path = [(0.5, action) for action in actions]
    assert answers(Level([path]), PatrRuleConfig(top_k=0)) == [0 if stopped else 1]


def test_repetitions_are_counted_across_a_horizon() -> None:
    """Θ = 6 at K = 5 could never fire inside one lease."""
    config = PatrRuleConfig(interval=2, margin=1.0, repeats=3)
    found = [run for seed in range(40) for run in LevelSearch(config, 4, seed).tree(0, 0)]
    assert any(run.ended == "stopped" and run.own < 3 for run in found)


def test_a_path_without_a_score_is_neither_split_nor_stopped_for_it() -> None:
    assert answers(scored(None, 0.9, 0.1, 0.8)) == [1, 2, 0, 2]
    assert answers(scored(None, None)) == [1, 1]
    assert answers(Level([[(None, "left")] * 6])) == [0]


def test_paths_that_are_over_are_not_scored_and_get_no_heirs() -> None:
    view = Level(
        [[(1.0, "up")], [(1.0, "up")], [(0.0, "up")], [(0.0, "up")]],
        ended={0: "finished", 1: "dropped: broken"},
    )
    assert [pick.heir_of for pick in PatrRule(PAPER).decide(view).picks] == [2, 2, 3, 3]


def test_one_path_on_the_way_holds_the_level_up() -> None:
    view = Level([[(1.0, "up")], [(0.0, "up")]], ended={1: ""})
    assert PatrRule(PAPER).decide(view) == WAIT and PatrRule(PAPER).explain(view) == []


def test_nothing_left_to_go_on_is_the_end() -> None:
    assert PatrRule(PAPER).decide(Level([[(1.0, "up")]], ended={0: "stopped"})) == COMPLETE


def test_a_stopped_path_is_a_failure_by_the_prune_rule() -> None:
    (stop,) = PatrRule(PAPER).decide(scored(1.0, 1.0, 0.25)).stops
    assert (stop.number, stop.reward, stop.source) == (2, 0.0, RewardSource.PRUNE_RULE)


@given(
    scores=st.lists(st.sampled_from([None, 0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=7),
    top_k=st.integers(0, 4),
    children=st.integers(1, 3),
    margin=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_the_best_path_is_never_stopped_and_no_split_path_scores_below_one_that_is_not(
    scores: list[float | None], top_k: int, children: int, margin: float
) -> None:
    config = PatrRuleConfig(top_k=top_k, children=children, margin=margin)
    heirs = answers(scored(*scores), config)
    known = [(score, count) for score, count in zip(scores, heirs, strict=True) if score is not None]
    alive = [score for score, count in known if count]
    assert not known or max(score for score, _ in known) in alive
    if children > 1:
        split = [score for score, count in known if count == children]
        others = [score for score, count in known if count == 1]
        assert len(split) == min(top_k, len(alive))
        assert not split or not others or min(split) >= max(others)
    assert all(count == 1 for score, count in zip(scores, heirs, strict=True) if score is None)


# ------------------------------------------------------------------------------------------ the rest of it


def test_the_explanation_says_what_the_decision_does() -> None:
    rule = PatrRule(PAPER)
    view = Level([[(0.9, "up")], [(0.1, "up")], [(None, "up")], [(0.7, "up")], [(0.8, "up")]])
    found = rule.explain(view)
    assert [s.anchor for s in found] == [1, 5, 4, 2, 3]
    assert [s.total for s in found] == [0.9, 0.8, 0.7, 0.1, 0.0]
    assert [s.terms["heirs"] for s in found] == [2, 2, 1, 0, 1]
    assert all(s.terms["median"] == pytest.approx(0.75) and s.terms["same_action"] == 1 for s in found)


def test_it_says_what_it_reads_and_needs() -> None:
    assert PatrRule.reads == {EventKind.NODE, EventKind.SCORE, EventKind.OUTCOME}
    assert PatrRule.requires == {"process_scores"}


def test_an_actor_without_process_scores_is_refused_in_one_sentence() -> None:
    rig = Rig(small(), PAPER, 4)
    rig.learner()
    rig.say("blind/1", hello("actor", "blind/1", capabilities=Capabilities(slots=1)))
    (goodbye,) = rig.take("blind/1", Bye)
    assert "allocator.rule=patr needs actors with process_scores" in goodbye.reason


@pytest.mark.parametrize(
    "field, value",
    [("interval", 0), ("children", 0), ("repeats", 0), ("top_k", -1), ("margin", -0.5)],
)
def test_a_constant_that_means_nothing_is_refused_with_its_key(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"allocator\.rule\.{field}"):
        PatrRuleConfig(**{field: value})  # type: ignore[arg-type]
