"""The trust region is in probabilities: which tokens it drops, and what pulls back."""

import math

import pytest

from common.config_learner import LossConfig
from learner.loss import LOSSES
from tests.learner.loss.cases import Case, Pair, Token, loss_of
from tests.run.door import compose

PLAIN = LossConfig(name="dppo", clip_low=0.2, clip_high=0.2, log_ratio_penalty=0.0)


def case(now: float, then: float, *advantages: float) -> Case:
    token = Token(math.log(now), math.log(0.9), math.log(then))
    return Case([token], [Pair(0, at, advantage) for at, advantage in enumerate(advantages)])


@pytest.mark.parametrize(
    "now, then, advantage, kept",
    [
        (0.75, 0.5, 1.0, False),  # risen by more than 0.2, and asked to rise
        (0.75, 0.5, -1.0, True),
        (0.25, 0.5, -1.0, False),  # fallen by more than 0.2, and asked to fall
        (0.25, 0.5, 1.0, True),
        (0.69, 0.5, 1.0, True),
        (0.02, 0.001, 1.0, True),  # twenty times as likely, and still unlikely: no ratio clip would allow it
    ],
)
def test_a_token_is_dropped_by_how_far_its_probability_moved_the_way_it_is_asked_to(
    now, then, advantage, kept
):
    _, gradient = loss_of("dppo", case(now, then, advantage), PLAIN)
    assert gradient[0] == pytest.approx(-advantage * now / then if kept else 0.0)
    clipped = LOSSES["dppo"].function(case(now, then, advantage).streams(), PLAIN).clipped
    assert clipped.tolist() == [not kept]


def test_a_shared_token_is_dropped_for_the_branches_of_one_sign_only():
    _, gradient = loss_of("dppo", case(0.75, 0.5, 1.0, 1.0, -0.5), PLAIN)
    assert gradient[0] == pytest.approx(0.5 * 1.5)


def test_the_penalty_pulls_every_trained_token_back_dropped_or_unpaid():
    settings = LossConfig(name="dppo", log_ratio_penalty=0.1)
    for advantage in (1.0, 0.0):
        loss, gradient = loss_of("dppo", case(0.75, 0.5, advantage), settings)
        assert loss[0] == pytest.approx(0.1 * math.log(1.5) ** 2)
        assert gradient[0] == pytest.approx(0.2 * math.log(1.5))


def test_the_penalty_counts_once_for_each_branch_by_its_weight():
    settings = LossConfig(name="dppo", log_ratio_penalty=0.1)
    shared = case(0.75, 0.5, 0.0, 0.0)
    assert loss_of("dppo", shared, settings)[0][0] == pytest.approx(2 * 0.1 * math.log(1.5) ** 2)


def test_the_constants_offered_are_prime_rls():
    settings = compose("learner/loss=dppo").learner.loss
    assert (settings.clip_low, settings.clip_high, settings.log_ratio_penalty) == (0.2, 0.2, 1e-3)
