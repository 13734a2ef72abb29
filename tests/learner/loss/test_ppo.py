"""The clip of the surrogate: where it binds, and with which constants."""

import math

import pytest
import torch

from common.config_learner import LossConfig
from common.errors import ConfigError
from learner.loss import LOSSES
from tests.learner.loss.cases import Case, Pair, Token, loss_of
from tests.run.door import compose

DAPO = LossConfig(clip_low=0.2, clip_high=0.28)


def one(ratio: float, advantage: float, settings: LossConfig = DAPO) -> tuple[float, float]:
    """(loss, gradient by log π) of one token."""
    case = Case([Token(-2.0 + math.log(ratio), -2.0, -2.0)], [Pair(0, 0, advantage)])
    loss, gradient = loss_of("ppo", case, settings)
    return loss[0], gradient[0]


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (1.1, 1.0, -1.1, -1.1),
        (1.3, 1.0, -1.28, 0.0),  # grown past 1 + high, and asked to grow
        (1.3, -1.0, 1.3, 1.3),  # grown, and asked to shrink
        (0.7, -1.0, 0.8, 0.0),  # shrunk past 1 - low, and asked to shrink
        (0.7, 1.0, -0.7, -0.7),
    ],
)
def test_the_clip_takes_the_gradient_only_where_it_binds(ratio, advantage, loss, gradient):
    assert one(ratio, advantage) == pytest.approx((loss, gradient))


@pytest.mark.parametrize("ratio, loss, gradient", [(2.9, 2.9, 2.9), (3.1, 3.0, 0.0), (40.0, 3.0, 0.0)])
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage(ratio, loss, gradient):
    settings = LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert one(ratio, -1.0, settings) == pytest.approx((loss, gradient))
    assert one(ratio, -1.0) == pytest.approx((ratio, ratio)), "without it nothing bounds it"
    assert one(ratio, 1.0, settings) == one(ratio, 1.0), "a positive advantage has its own bound"


def test_a_shared_token_is_clipped_on_the_side_of_each_branch_apart():
    """Advantages that cancel in the sum do not cancel in the loss: 1.5 − 1.28 is left, and one gradient."""
    case = Case([Token(-2.0 + math.log(1.5), -2.0, -2.0)], [Pair(0, 0, 1.0), Pair(0, 1, -1.0)])
    loss, gradient = loss_of("ppo", case, DAPO)
    assert (loss[0], gradient[0]) == pytest.approx((0.22, 1.5))


def test_what_was_clipped_is_told_token_by_token():
    tokens = [Token(-2.0 + math.log(r), -2.0, -2.0) for r in (1.5, 1.5, 0.5, 0.5, 1.0)]
    paid = [Pair(at, at, advantage) for at, advantage in enumerate((1.0, -1.0, 1.0, -1.0, 1.0))]
    clipped = LOSSES["ppo"].function(Case(tokens, paid).streams(), DAPO).clipped
    assert torch.equal(clipped, torch.tensor([True, False, False, True, False]))


def test_the_dual_clip_is_refused_below_1_and_beside_other_losses():
    with pytest.raises(ConfigError, match=r"learner.loss.dual_clip must be above 1, or 0 for none, got 0.9"):
        LossConfig(dual_clip=0.9)
    with pytest.raises(ConfigError, match=r"learner.loss.dual_clip must be 0 unless learner.loss=ppo"):
        compose("learner/loss=cispo", "learner.loss.dual_clip=3")
