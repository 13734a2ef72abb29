"""Group filters on raw rewards, and how much there is to learn from in a batch."""

import math

import msgspec
import pytest

from common.config_learner import CreditConfig, GroupFilterConfig, NodeWeight
from common.nouns import RewardSource, Version
from learner.contrast import advantage_mass, contrast_metrics, has_mixed_versions, rifb
from learner.credit import CREDITS
from learner.filters import FilterCounts, filter_group
from learner.rows import Clock, RowCounts, build_rows
from tests.learner.helpers import V0, continuation, make_tree, node, turn

MIXED, NONE = GroupFilterConfig(name="mixed"), GroupFilterConfig()


def flat(*rewards, versions=(V0,)):
    nodes = [
        node(i + 1, 0, i, 0, turn((5, 6), (), versions=[(versions[i % len(versions)], 2)]))
        for i in range(len(rewards))
    ]
    ends = [continuation(i, [i + 1], r, weight=1 / len(rewards), baseline=0.5) for i, r in enumerate(rewards)]
    return make_tree(nodes, ends)


def credits_of(name, tree):
    return CREDITS[name](tree, CreditConfig(name=name))


def shaped(tree, rewards):
    ends = [
        msgspec.structs.replace(c, outcome=msgspec.structs.replace(c.outcome, reward=r))
        for c, r in zip(tree.continuations, rewards, strict=True)
    ]
    return msgspec.structs.replace(tree, continuations=ends)


def test_a_uniform_group_is_filtered_and_a_mixed_one_is_left_as_it_is():
    counts = FilterCounts()
    for tree, zero in ((flat(1.0, 1.0), True), (flat(1.0, 0.0), False)):
        credits = credits_of("granted", tree)
        left = filter_group(tree, credits, MIXED, counts)
        assert all(c.advantages == (0.0,) for c in left) if zero else left == credits
    assert (counts.groups, counts.filtered) == (2, 1)
    assert counts.metrics() == {"filtered_groups": 0.5, "filtered_success": 1.0, "filtered_tokens": 2.0}


def test_the_filter_looks_at_raw_rewards_and_a_length_penalty_breaks_no_tie():
    tree = shaped(flat(0.0, 0.0), [-0.1, -0.2])
    assert all(
        c.advantages == (0.0,) for c in filter_group(tree, credits_of("granted", tree), MIXED, FilterCounts())
    )
    tree = shaped(flat(0.0, 1.0), [0.5, 0.5])
    assert filter_group(tree, credits_of("granted", tree), MIXED, FilterCounts()) == credits_of(
        "granted", tree
    )


def test_without_a_filter_every_group_is_trained_and_counted():
    counts, tree = FilterCounts(), flat(1.0, 1.0)
    assert filter_group(tree, credits_of("granted", tree), NONE, counts) == credits_of("granted", tree)
    assert counts.metrics() == {"filtered_groups": 0.0} and FilterCounts().metrics() == {
        "filtered_groups": 0.0
    }


def test_a_filtered_group_stays_in_every_denominator_and_each_of_its_tokens_is_accounted_for():
    tree, counts = flat(1.0, 1.0), RowCounts()
    left = filter_group(tree, credits_of("granted", tree), MIXED, FilterCounts())
    rows = build_rows(tree, left, NodeWeight.GRANTED, Clock(V0, 0), counts)
    assert [c.weight for c in left] == [0.5, 0.5] and not any(row.has_gradient() for row in rows)
    assert (counts.tokens_generated, counts.tokens_without_contrast, counts.stale_branches) == (4, 4, 0)


def test_a_group_with_one_outcome_left_has_nothing_to_compare():
    counts, tree = FilterCounts(), flat(1.0, None, None)
    assert filter_group(tree, credits_of("granted", tree), MIXED, counts)[0].advantages == (0.0,)


def test_the_filter_refuses_a_reward_that_is_no_number():
    tree = flat(1.0, math.nan)
    with pytest.raises(ValueError, match="has the reward nan"):
        filter_group(tree, (), MIXED, FilterCounts())


# ------------------------------------------------------------------------------------------ contrast


@pytest.mark.parametrize(
    "rewards, mass",
    [((1.0, 0.0), 1.0), ((1.0, 0, 0, 0), math.sqrt(3) / 2), ((1.0, 1.0), 0.0), ((None,), 0.0)],
)
def test_rifb_is_twice_the_spread_of_a_coin(rewards, mass):
    assert rifb(flat(*rewards)) == pytest.approx(mass)


def test_only_the_environments_word_is_an_outcome_here():
    tree = flat(1.0, 0.0)
    guess = msgspec.structs.replace(tree.continuations[1].outcome, source=RewardSource.PRUNE_RULE)
    guessed = [tree.continuations[0], msgspec.structs.replace(tree.continuations[1], outcome=guess)]
    assert rifb(msgspec.structs.replace(tree, continuations=guessed)) == 0.0


def test_the_mass_of_a_z_score_is_rifb_but_for_bessels_correction():
    tree = flat(*[1.0] * 30, *[0.0] * 90)
    assert advantage_mass(credits_of("grpo", tree)) == pytest.approx(
        rifb(tree) * math.sqrt(119 / 120), abs=1e-4
    )


def test_a_batch_says_how_much_contrast_it_has_and_how_many_trees_have_none():
    trees = [flat(1.0, 0.0), flat(1.0, 1.0)]
    found = contrast_metrics(trees, [credits_of("dr_grpo", tree) for tree in trees])
    assert found == {
        "rifb": 0.5, "advantage_mass": 0.25, "advantage_mass_min": 0.0, "advantage_mass_max": 0.5,
        "trees_without_gradient": 0.5, "trees_of_mixed_versions": 0.0,
    }  # fmt: skip
    assert contrast_metrics([], []) == {}


def test_a_group_that_mixes_versions_is_flagged():
    assert has_mixed_versions(flat(1.0, 0.0, versions=(V0, Version(0, 1))))
    assert not has_mixed_versions(flat(1.0, 0.0))
