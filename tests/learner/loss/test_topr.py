"""Successes count in full, failures by how likely they still are."""

import math

import pytest

from learner.loss import LOSSES
from tests.learner.loss.cases import SETTINGS, Case, Pair, Token, loss_of


def branch(mean_log_ratio: float, *advantages: float) -> Case:
    spread = (0.5, -0.5, 0.0)[: len(advantages)]
    spread = spread if len(advantages) != 1 else (0.0,)
    tokens = [Token(-2.0 + mean_log_ratio + move, -9.0, -2.0) for move in spread]
    return Case(tokens, [Pair(at, 0, advantage) for at, advantage in enumerate(advantages)])


@pytest.mark.parametrize("log_ratio, kept", [(-0.7, math.exp(-0.7)), (0.0, 1.0), (0.9, 1.0)])
def test_a_failure_weighs_its_sequence_ratio_and_at_most_1(log_ratio, kept):
    _, gradient = loss_of("topr", branch(log_ratio, -0.5, -0.5, -0.5))
    assert gradient == pytest.approx([0.5 * kept] * 3)


@pytest.mark.parametrize("log_ratio", [-3.0, 0.0, 3.0])
def test_a_success_weighs_1_however_unlikely_it_has_become(log_ratio):
    assert loss_of("topr", branch(log_ratio, 0.5, 0.5))[1] == pytest.approx([-0.5] * 2)


def test_turns_of_one_branch_are_told_apart_by_their_own_sign():
    _, gradient = loss_of("topr", branch(-1.0, 0.5, -0.5))
    assert gradient == pytest.approx([-0.5, 0.5 * math.exp(-1.0)])


def test_the_ratio_is_to_the_behaviour_policy_whatever_the_proximal_one_is():
    far = branch(-0.7, -0.5)
    assert far.tokens[0].old == -9.0
    assert loss_of("topr", far)[1] == pytest.approx([0.5 * math.exp(-0.7)])


def test_only_failures_that_have_become_likelier_are_told_as_bounded():
    for log_ratio, advantage, bounded in ((0.5, -1.0, True), (-0.5, -1.0, False), (0.5, 1.0, False)):
        streams = branch(log_ratio, advantage).streams()
        assert LOSSES["topr"].function(streams, SETTINGS["topr"]).clipped.tolist() == [bounded]
