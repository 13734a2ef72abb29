"""Each credit against its formula, computed by hand or by a slow literal oracle."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config_learner import CreditConfig
from learner.credit import CREDITS, BranchCredit
from learner.credit.grpo import z_scores
from tests.learner.helpers import continuation, forked_tree, make_tree, node, turn

SETTINGS = CreditConfig()


def credits_of(name: str, tree) -> list[BranchCredit]:
    return CREDITS[name](tree, SETTINGS)


def flat(*rewards: float | None):
    nodes = [node(i + 1, 0, i, 0, turn((5,))) for i in range(len(rewards))]
    return make_tree(nodes, [continuation(i, [i + 1], reward) for i, reward in enumerate(rewards)])


def test_granted_pays_return_minus_what_was_predicted_before_each_turn():
    owner, fork = credits_of("granted", forked_tree())
    # The owner's first turn has the baseline of its grant, its second the value of the node before it.
    assert owner.advantages == (1.0 - 0.125, 1.0 - 0.25)
    # The fork's branch contains the owner's first turn, with that turn's baseline and the fork's return.
    assert fork.advantages == (0.0 - 0.125, 0.0 - 0.5)
    assert (owner.weight, fork.weight) == (0.5, 0.25)
    assert [turn.index for turn in fork.turns] == [1, 3]


def test_granted_subtracts_nothing_where_nothing_was_predicted():
    tree = make_tree([node(1, 0, 0, 0, turn((5,)))], [continuation(0, [1], 1.0, baseline=None)])
    assert credits_of("granted", tree)[0].advantages == (1.0,)


@pytest.mark.parametrize("name", CREDITS)
def test_a_continuation_without_an_outcome_gets_no_credit_and_is_no_zero_reward(name):
    with_failure, without = credits_of(name, flat(1.0, None, 0.0)), credits_of(name, flat(1.0, 0.0))
    assert [credit.continuation.number for credit in with_failure] == [0, 2]
    assert [credit.advantages for credit in with_failure] == [credit.advantages for credit in without]


@pytest.mark.parametrize("name", CREDITS)
def test_every_turn_of_the_branch_has_an_advantage(name):
    for credit in credits_of(name, forked_tree()):
        assert len(credit.advantages) == len(credit.turns)


def test_granted_does_not_depend_on_the_other_branches():
    alone, crowded = credits_of("granted", flat(1.0))[0], credits_of("granted", flat(1.0, 0.0, 0.0))[0]
    assert (alone.advantages, alone.weight) == (crowded.advantages, crowded.weight)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9).filter(lambda r: max(r) - min(r) > 1e-3))
def test_grpo_equals_the_z_score_with_bessel_correction(rewards):
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    assert z_scores(rewards, 1e-6) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_grpo_pays_exactly_zero_when_seven_rewards_of_0_35_are_equal():
    # Their mean differs from 0.35 in the last bit, which epsilon would turn into a gradient.
    assert sum([0.35] * 7) / 7 - 0.35 != 0.0 or math.fsum([0.35] * 7) / 7 == 0.35
    for credit in credits_of("grpo", flat(*[0.35] * 7)):
        assert credit.advantages == (0.0,)


def test_grpo_pays_a_single_leaf_exactly_zero():
    assert credits_of("grpo", flat(0.7))[0].advantages == (0.0,)


def test_grpo_weighs_each_leaf_by_the_realised_number_of_leaves():
    assert [credit.weight for credit in credits_of("grpo", flat(1.0, 0.0, 0.0, None))] == [1 / 3] * 3


def test_grpo_decides_contrast_in_each_group_on_its_own():
    # A batch-wide spread must not give the uniform group a gradient, nor take it from the mixed one.
    uniform, mixed = credits_of("grpo", flat(1.0, 1.0)), credits_of("grpo", flat(0.0, 1.0))
    assert all(credit.advantages == (0.0,) for credit in uniform)
    assert all(credit.advantages != (0.0,) for credit in mixed)
