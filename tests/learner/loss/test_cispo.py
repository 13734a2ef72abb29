"""A clipped importance weight keeps the gradient, which a clipped surrogate does not."""

import math

import pytest

from common.config_learner import LossConfig
from learner.loss import LOSSES
from tests.learner.loss.cases import Case, Pair, Token, loss_of


def case(ratio: float, advantage: float) -> Case:
    return Case([Token(-2.0 + math.log(ratio), -2.0, -2.0)], [Pair(0, 0, advantage)])


@pytest.mark.parametrize("ratio, advantage", [(1.5, 1.0), (0.5, -1.0)])
def test_clipped_tokens_keep_their_gradient_where_ppo_takes_it(ratio, advantage):
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
    kept = loss_of("cispo", case(ratio, advantage), LossConfig(name="cispo", **bounds))[1][0]
    assert kept == pytest.approx(-advantage * (1.28 if ratio > 1 else 0.8))
    assert loss_of("ppo", case(ratio, advantage), LossConfig(**bounds))[1] == [0.0]


def test_a_token_whose_weight_was_cut_is_told_as_clipped_whatever_its_advantage():
    settings = LossConfig(name="cispo", clip_low=0.2, clip_high=0.28)
    for advantage in (1.0, -1.0):
        for ratio, cut in ((1.5, True), (0.5, True), (1.1, False)):
            clipped = LOSSES["cispo"].function(case(ratio, advantage).streams(), settings).clipped
            assert clipped.tolist() == [cut]
    assert not LOSSES["cispo"].function(case(1.5, 0.0).streams(), settings).clipped.any()


@pytest.mark.parametrize("ratio, weight", [(0.01, 0.01), (4.9, 4.9), (5.5, 5.0)])
def test_the_bounds_offered_are_0_and_5(ratio, weight):
    settings = LossConfig(name="cispo", clip_low=1.0, clip_high=4.0)  # configs/learner/loss/cispo.yaml
    assert loss_of("cispo", case(ratio, 1.0), settings)[1][0] == pytest.approx(-weight)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 1.01, 1.5])
def test_with_bounds_0_and_1_02_it_is_the_clamped_reinforce_of_pipeline_rl(ratio):
    settings = LossConfig(name="cispo", clip_low=1.0, clip_high=0.02)
    loss, gradient = loss_of("cispo", case(ratio, 0.7), settings)
    assert gradient[0] == pytest.approx(-0.7 * min(ratio, 1.02))
    assert loss[0] == pytest.approx(-0.7 * min(ratio, 1.02) * (-2.0 + math.log(ratio)))
