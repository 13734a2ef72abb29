"""Numbers that an update says about itself, against their definitions."""

import math

import pytest
import torch

from common.config_learner import LossConfig
from learner.backend.alone import alone
from learner.diagnostics import TokenLog, effective_sample_size, kl_k3, summarise
from learner.loss import TokenLoss
from learner.objective import Parts
from learner.policy import TokenLogprobs, build_model
from learner.rows import Clock
from learner.update import Updater
from learner.weight import TokenWeight
from tests.learner.by_hand import micro_batch
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, V0, flat_trees, learner_config


def test_k3_is_never_negative_and_zero_where_nothing_moved():
    ratios = torch.tensor([1.0, 1e-8, 0.5, 2.0, 1e8])
    found = kl_k3(ratios)
    assert (found >= 0).all() and found[0] == 0.0
    assert found[2].item() == pytest.approx(0.5 - 1 - math.log(0.5))


def test_the_mean_of_k3_over_the_sampling_distribution_is_the_divergence():
    mu, pi = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (mu * (mu / pi).log()).sum()
    assert (mu * kl_k3(pi / mu)).sum().item() == pytest.approx(exact.item())


def test_k3_of_a_small_move_is_half_its_square_and_no_rounding():
    move = torch.tensor([1e-3, -1e-3]).double()
    assert kl_k3(move.exp()).tolist() == pytest.approx([5e-7, 5e-7], rel=1e-3)


def test_a_mean_ratio_near_one_hides_what_the_effective_sample_size_shows():
    ratios = torch.tensor([*[0.9] * 99, 10.9])
    assert ratios.mean().item() == pytest.approx(1.0)
    assert effective_sample_size(ratios) < 0.51


# ------------------------------------------------------------------------------- one batch, all its numbers

RATIOS, LAGS = (0.5, 1.0, 1.0, 2.0, 4.0), (0, 0, 1, 2, 0)
"""π_θ / μ of five tokens, and how old they are."""
CLIPPED, LIMITED = (True, False, False, False, False), (False, True, True, True, False)
WEIGHTS = (1.0, 0.0, 0.7, 2.0, 0.0)
"""Behaviour weights: two are 0, one of which no bound is to blame for."""
ENTROPIES, KLS = (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 1.0, 0.0, 0.0, 0.5)
LOG2 = math.log(2)
EXPECTED = {
    "entropy": 0.3,
    "clip_fraction": 0.2,
    "weight_limited_fraction": 0.6,
    "drop_fraction": 0.4,
    "ratio_ess": 8.5**2 / (5 * 22.25),
    "ratio_max": 4.0,
    "ratio_q01": 0.52,
    "ratio_q50": 1.0,
    "ratio_q99": 3.92,
    "kl_behaviour": ((0.5 - 1 + LOG2) + (2 - 1 - LOG2) + (4 - 1 - 2 * LOG2)) / 5,
    "kl_term": 0.3,
    "lag_mean": 0.6,
    "lag_share_0": 0.6,
    "lag_share_1": 0.2,
    "lag_share_2": 0.2,
    "logprob_gap": (LOG2 + 0 + 2 * LOG2) / 3,
    "logprob_gap_max": 2 * LOG2,
}


def take_in(log: TokenLog, tokens: slice = slice(None), *, kl: bool = True) -> TokenLog:
    """The log with some of the five tokens, as the update would tell it of them."""
    behaviour = torch.tensor([-1.0, -2.0, -0.5, -3.0, -2.5])[tokens]
    batch = micro_batch(behaviour.tolist(), LAGS[tokens])
    logprobs = (behaviour + torch.tensor(RATIOS[tokens]).log()).requires_grad_()
    count = len(behaviour)
    parts = Parts(
        total=torch.zeros(()),
        loss=TokenLoss(torch.ones(count), torch.tensor(CLIPPED[tokens])),
        weight=TokenWeight(torch.tensor(WEIGHTS[tokens]), torch.tensor(LIMITED[tokens])),
        old=logprobs.detach() - 0.25,  # of no interest here
        kl=torch.tensor(KLS[tokens]) if kl else None,
    )
    log.add(batch, TokenLogprobs(logprobs, torch.tensor(ENTROPIES[tokens])), parts)
    return log


def test_every_number_of_a_batch_is_what_its_name_says() -> None:
    found = summarise(take_in(TokenLog()), max_lag=2)
    assert found == pytest.approx(EXPECTED, rel=1e-5)


def test_micro_batches_count_by_their_tokens() -> None:
    log = take_in(take_in(TokenLog(), slice(0, 1)), slice(1, 5))
    assert summarise(log, max_lag=2) == pytest.approx(EXPECTED, rel=1e-5)


def test_without_a_reference_nothing_is_said_of_it_and_of_nothing_nothing() -> None:
    assert "kl_term" not in summarise(take_in(TokenLog(), kl=False), max_lag=2)
    assert summarise(TokenLog(), max_lag=2) == {}


def test_the_mismatch_is_of_tokens_sampled_by_these_weights_before_they_moved() -> None:
    log = take_in(TokenLog(), slice(0, 1))
    log.moved = True
    found = summarise(take_in(log, slice(1, 5)), max_lag=2)
    assert (found["logprob_gap"], found["logprob_gap_max"]) == pytest.approx((LOG2, LOG2))
    stale = summarise(take_in(TokenLog(), slice(2, 4)), max_lag=2)
    assert "logprob_gap" not in stale, "every token is older than the weights"


def test_the_logs_of_two_ranks_say_what_one_would() -> None:
    parts = [take_in(TokenLog(), tokens).to_bytes() for tokens in (slice(0, 2), slice(2, 5))]
    assert summarise(TokenLog.merged(parts), max_lag=2) == pytest.approx(EXPECTED, rel=1e-5)
    idle = [*parts, TokenLog().to_bytes()]
    assert summarise(TokenLog.merged(idle), max_lag=2) == pytest.approx(EXPECTED, rel=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_only_the_first_epoch_is_logged(minibatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def logged(epochs: int) -> float:
        settings = learner_config(loss=LossConfig(epochs=epochs, minibatches=minibatches))
        up = Updater(alone(build_model(SMALL_MODEL, TOKENIZER, seed=3), settings), settings, temperature=1.0)
        return up.update(trees, Clock(V0, 1)).metrics["logged"]

    monkeypatch.setattr("learner.update.summarise", lambda log, _: {"logged": sum(map(len, log.ratios))})
    trees = flat_trees(4)
    assert logged(1) == logged(2) == sum(tree.num_action_tokens() for tree in trees)
