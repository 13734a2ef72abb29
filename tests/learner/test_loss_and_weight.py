"""Losses and behaviour weights against slow literal oracles in numpy, one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import run
from common import cli
from common.config_learner import LossConfig, WeightConfig
from learner.loss import LOSSES
from learner.weight import WEIGHTS

LOSS = LossConfig(clip_low=0.2, clip_high=0.28)
LOGPROB = st.floats(-8, 0)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3), st.booleans()), min_size=1, max_size=12)


def ppo_oracle(logprob: float, old: float, advantage: float, settings: LossConfig) -> float:
    r = math.exp(logprob - old)
    clipped = min(max(r, 1 - settings.clip_low), 1 + settings.clip_high)
    return -min(r * advantage, clipped * advantage)


def tensors(tokens):
    logprobs, old, advantages, mask = zip(*tokens, strict=True)
    numbers = [torch.tensor(values, dtype=torch.float64) for values in (logprobs, old, advantages)]
    return *numbers, torch.tensor(mask)


@given(TOKENS)
def test_ppo_equals_the_clipped_surrogate_token_by_token(tokens):
    logprobs, old, advantages, mask = tensors(tokens)
    found = LOSSES["ppo"](logprobs, old, advantages, mask, LOSS).loss
    expected = [ppo_oracle(p, o, a, LOSS) if kept else 0.0 for p, o, a, kept in tokens]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "logprob_change, advantage, flows",
    [
        (0.1, 1.0, True),
        (math.log(1.3), 1.0, False),  # grown past 1 + high, and asked to grow
        (math.log(1.3), -1.0, True),  # grown, and asked to shrink
        (math.log(0.7), -1.0, False),  # shrunk past 1 - low, and asked to shrink
        (math.log(0.7), 1.0, True),
    ],
)
def test_ppo_stops_the_gradient_only_where_the_clip_binds(logprob_change, advantage, flows):
    logprobs = torch.tensor([-1.0 + logprob_change], requires_grad=True)
    mask = torch.tensor([True])
    result = LOSSES["ppo"](logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), mask, LOSS)
    result.loss.sum().backward()
    assert bool(logprobs.grad != 0) is flows
    assert bool(result.clipped) is not flows


def test_ppo_at_the_old_policy_has_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -3.0])
    LOSSES["ppo"](
        logprobs, logprobs.detach(), advantages, torch.tensor([True, True]), LOSS
    ).loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_a_masked_token_may_hold_anything_without_touching_loss_or_gradient(name, poison):
    logprobs = torch.tensor([-1.0, poison], requires_grad=True)
    old, advantages = torch.tensor([-1.1, poison]), torch.tensor([1.0, poison])
    mask = torch.tensor([True, False])
    result = LOSSES[name](logprobs, old, advantages, mask, LOSS)
    result.loss.sum().backward()
    alone = LOSSES[name](logprobs[:1], old[:1], advantages[:1], mask[:1], LOSS).loss
    assert result.loss[1] == 0 and result.loss[0] == alone[0]
    assert torch.isfinite(logprobs.grad).all() and logprobs.grad[1] == 0


def test_an_absurd_ratio_stays_finite():
    logprobs = torch.tensor([0.0], requires_grad=True)
    result = LOSSES["ppo"](logprobs, torch.tensor([-1e4]), torch.tensor([-1.0]), torch.tensor([True]), LOSS)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all() and torch.isfinite(logprobs.grad).all()


# ------------------------------------------------------------------------------------ behaviour weights


def weigh(name, proximal, behaviour, cap=2.0, mask=None):
    proximal, behaviour = torch.tensor(proximal), torch.tensor(behaviour)
    mask = torch.ones(len(proximal), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return WEIGHTS[name].weigh(proximal, behaviour, mask, WeightConfig(cap=cap))


@given(st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=12), st.floats(0.5, 10))
def test_tis_is_the_ratio_of_proximal_to_behaviour_truncated_at_the_cap(pairs, cap):
    proximal, behaviour = zip(*pairs, strict=True)
    expected = [min(math.exp(p - b), cap) for p, b in pairs]
    np.testing.assert_allclose(weigh("tis", proximal, behaviour, cap).weight.numpy(), expected, rtol=1e-4)


@given(st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=12))
def test_decoupled_is_the_same_ratio_and_zero_above_the_cap(pairs):
    cap = 2.0
    pairs = [pair for pair in pairs if abs(math.exp(pair[0] - pair[1]) - cap) > 1e-4] or [(-1.0, -1.0)]
    proximal, behaviour = zip(*pairs, strict=True)
    ratios = [math.exp(p - b) for p, b in pairs]
    expected = [ratio if ratio <= cap else 0.0 for ratio in ratios]
    found = weigh("decoupled", proximal, behaviour, cap)
    np.testing.assert_allclose(found.weight.numpy(), expected, rtol=1e-4)
    assert found.limited.tolist() == [ratio > cap for ratio in ratios]


@pytest.mark.parametrize("name, cap, worth", [("tis", 2.0, [2.0, 2.0]), ("decoupled", 5.0, [3.0, 0.0])])
def test_the_caps_offered_are_those_of_the_papers_truncation_at_2_and_masking_at_5(name, cap, worth):
    config = run.compose(cli.parse([f"learner/weight={name}"], cli.groups(run.CONFIGS)))
    assert (config.learner.weight.name, config.learner.weight.cap) == (name, cap)
    ratios = [math.log(3.0), math.log(6.0)]
    found = weigh(name, ratios, [0.0, 0.0], config.learner.weight.cap).weight
    assert found.tolist() == pytest.approx(worth)


def test_decoupled_has_no_lower_bound():
    assert weigh("decoupled", [-9.0], [-1.0]).weight.item() == pytest.approx(math.exp(-8), rel=1e-4)


def test_no_weight_is_one_for_every_token():
    assert weigh("none", [-3.0, -0.1], [-1.0, -5.0]).weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_carries_no_gradient_and_survives_masked_nans(name):
    proximal = torch.tensor([-1.0, math.nan], requires_grad=True)
    found = WEIGHTS[name].weigh(
        proximal, torch.tensor([-1.5, math.nan]), torch.tensor([True, False]), WeightConfig()
    )
    assert not found.weight.requires_grad
    assert torch.isfinite(found.weight).all() and not found.limited[1]


def test_only_the_weights_that_correct_by_themselves_change_the_loss_to_the_proximal_policy():
    # With the behaviour policy in both places a token would be corrected twice.
    assert {name: weight.proximal for name, weight in WEIGHTS.items()} == {
        "none": False,
        "tis": True,
        "decoupled": True,
    }
