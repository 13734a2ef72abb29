"""One ratio for a branch: its length, its clip, and where its gradient goes."""

import math

import pytest

from common.config_learner import LossConfig
from learner.loss import LOSSES
from tests.learner.loss.cases import Case, Pair, Token, loss_of
from tests.run.door import compose

WIDE = LossConfig(name="gspo", clip_low=0.9, clip_high=9.0)
MOVES = (0.3, -0.1, 0.4)
"""Log-ratios of a branch's tokens; their mean is 0.2."""


def branch(advantages: tuple[float, ...], moves: tuple[float, ...] = MOVES) -> Case:
    tokens = [Token(-2.0 + move, -2.0, -2.0) for move in moves]
    return Case(tokens, [Pair(at, 0, advantage) for at, advantage in enumerate(advantages)])


def test_the_ratio_of_a_branch_is_the_geometric_mean_over_its_tokens():
    loss, _ = loss_of("gspo", branch((0.5, 0.5, 0.5)), WIDE)
    assert loss == pytest.approx([-0.5 * math.exp(0.2)] * 3)


def test_with_equal_advantages_it_is_the_gradient_of_the_sequence_ratio_times_the_tokens():
    """GSPO, eq. 10: ∇ s A = s A · mean over tokens of ∇ log π; here tokens are summed, not averaged."""
    _, gradient = loss_of("gspo", branch((0.5, 0.5, 0.5)), WIDE)
    of_sequence = -0.5 * math.exp(0.2) / 3
    assert gradient == pytest.approx([3 * of_sequence] * 3)


def test_each_turn_may_have_its_own_advantage_under_the_ratio_of_the_whole_branch():
    _, gradient = loss_of("gspo", branch((1.0, -2.0, 0.0)), WIDE)
    assert gradient == pytest.approx([-math.exp(0.2), 2 * math.exp(0.2), 0.0])


def test_the_clip_takes_a_whole_branch_or_nothing():
    narrow = LossConfig(name="gspo", clip_low=0.1, clip_high=0.1)
    assert loss_of("gspo", branch((1.0, 1.0, 1.0)), narrow)[1] == [0.0] * 3
    streams = branch((1.0, 1.0, 1.0)).streams()
    assert LOSSES["gspo"].function(streams, narrow).clipped.all()
    fallen = branch((1.0, 1.0, 1.0), (0.9, -0.9, 0.03))  # single ratios far outside, their mean inside
    assert loss_of("gspo", fallen, narrow)[1] == pytest.approx([-math.exp(0.01)] * 3)


def test_a_shared_token_has_the_ratio_of_each_of_its_branches():
    tokens = [Token(-1.0, -1.0, -1.0), Token(-1.0, -1.4, -1.4), Token(-1.0, -0.4, -0.4)]
    paid = [Pair(0, 0, 1.0), Pair(1, 0, 1.0), Pair(0, 1, 1.0), Pair(2, 1, 1.0)]
    _, gradient = loss_of("gspo", Case(tokens, paid), WIDE)
    up, down = math.exp(0.2), math.exp(-0.3)
    assert gradient == pytest.approx([-up - down, -up, -down])


def test_the_clip_offered_is_the_papers_3e_4_and_4e_4():
    settings = compose("learner/loss=gspo").learner.loss
    assert (settings.clip_low, settings.clip_high) == (3e-4, 4e-4)
    for move, advantage, flows in ((3.9e-4, 1.0, True), (4.1e-4, 1.0, False), (-3.1e-4, -1.0, False)):
        _, gradient = loss_of("gspo", branch((advantage,), (move,)), settings)
        assert (gradient != [0.0]) is flows
