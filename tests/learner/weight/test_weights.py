"""Behaviour weights against literal oracles, one token at a time."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config_learner import ProximalPolicy, WeightConfig
from common.errors import ConfigError
from learner.weight import WEIGHTS
from tests.run.door import compose

LOGPROB = st.floats(-8, 0)
PAIRS = st.lists(st.tuples(LOGPROB, LOGPROB), min_size=1, max_size=12)


def weigh(name, proximal, behaviour, cap=2.0, mask=None, floor=0.5):
    proximal, behaviour = (torch.tensor(v, dtype=torch.float64) for v in (proximal, behaviour))
    mask = torch.ones(len(proximal), dtype=torch.bool) if mask is None else torch.tensor(mask)
    return WEIGHTS[name].weigh(proximal, behaviour, mask, WeightConfig(name=name, cap=cap, floor=floor))


@given(PAIRS, st.floats(0.6, 10))
def test_tis_is_the_ratio_of_proximal_to_behaviour_truncated_at_the_cap(pairs, cap):
    proximal, behaviour = zip(*pairs, strict=True)
    expected = [min(math.exp(p - b), cap) for p, b in pairs]
    np.testing.assert_allclose(weigh("tis", proximal, behaviour, cap).weight, expected)


@given(PAIRS, st.floats(0.6, 10))
def test_decoupled_is_the_same_ratio_and_zero_above_the_cap(pairs, cap):
    proximal, behaviour = zip(*pairs, strict=True)
    ratios = [math.exp(p - b) for p, b in pairs]
    found = weigh("decoupled", proximal, behaviour, cap)
    np.testing.assert_allclose(found.weight, [ratio if ratio <= cap else 0.0 for ratio in ratios])
    assert found.limited.tolist() == [ratio > cap for ratio in ratios]


@given(PAIRS, st.floats(0.6, 10), st.floats(0, 0.59))
def test_icepop_is_the_same_ratio_and_zero_outside_both_bounds(pairs, cap, floor):
    proximal, behaviour = zip(*pairs, strict=True)
    ratios = [math.exp(p - b) for p, b in pairs]
    found = weigh("icepop", proximal, behaviour, cap, floor=floor)
    kept = [floor <= ratio <= cap for ratio in ratios]
    np.testing.assert_allclose(found.weight, [r if k else 0.0 for r, k in zip(ratios, kept, strict=True)])
    assert found.limited.tolist() == [not k for k in kept]


RATIOS = [0.4, 0.6, 3.0, 6.0]


@pytest.mark.parametrize(
    "option, cap, worth",
    [
        ("tis", 2.0, [0.4, 0.6, 2.0, 2.0]),
        ("icepop", 5.0, [0.0, 0.6, 3.0, 0.0]),
        ("decoupled", 5.0, [0.4, 0.6, 3.0, 0.0]),
        ("interpolated", 5.0, [0.4, 0.6, 3.0, 0.0]),
    ],
)
def test_the_bounds_offered_are_those_of_known_implementations(option, cap, worth):
    settings = compose(f"learner/weight={option}").learner.weight
    assert settings.cap == cap
    proximal = torch.log(torch.tensor(RATIOS))
    kept = torch.ones(4, dtype=torch.bool)
    found = WEIGHTS[settings.name].weigh(proximal, torch.zeros(4), kept, settings)
    assert found.weight.tolist() == pytest.approx(worth)


def test_decoupled_has_no_lower_bound():
    assert weigh("decoupled", [-9.0], [-1.0]).weight.item() == pytest.approx(math.exp(-8))


def test_no_weight_is_one_for_every_token():
    found = weigh("none", [-3.0, -0.1], [-1.0, -5.0])
    assert found.weight.tolist() == [1.0, 1.0] and not found.limited.any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_carries_no_gradient_and_survives_what_masked_positions_hold(name, poison):
    proximal = torch.tensor([-1.0, poison], requires_grad=True)
    found = WEIGHTS[name].weigh(
        proximal, torch.tensor([-1.5, poison]), torch.tensor([True, False]), WeightConfig(name=name)
    )
    assert not found.weight.requires_grad
    assert torch.isfinite(found.weight).all() and not found.limited[1]


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_absurd_ratio_stays_finite(name):
    for proximal, behaviour in ((0.0, -1e4), (-1e4, 0.0)):
        assert torch.isfinite(weigh(name, [proximal], [behaviour], cap=1e9).weight).all()


# --------------------------------------------------------------------------------------- the proximal policy

CURRENT, BEHAVIOUR = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
LAGS = torch.tensor([0, 3])


@pytest.mark.parametrize("name", WEIGHTS)
def test_only_weights_that_correct_by_themselves_move_the_ratio_of_the_loss_to_the_proximal_policy(name):
    # With the behaviour policy in both places a token would be corrected twice.
    recomputed = torch.tensor([-1.1, -1.9])
    weight, settings = WEIGHTS[name], WeightConfig(name=name)
    old = weight.proximal_of(CURRENT, BEHAVIOUR, LAGS, recomputed, settings)
    assert weight.name == name
    assert weight.proximal is (name != "none") is weight.recomputed(settings)
    assert torch.equal(old, recomputed if weight.proximal else BEHAVIOUR)


@pytest.mark.parametrize("name", ["tis", "icepop", "decoupled"])
def test_before_the_first_step_of_a_batch_the_proximal_policy_is_the_current_one_detached(name):
    current = CURRENT.clone().requires_grad_()
    old = WEIGHTS[name].proximal_of(current, BEHAVIOUR, LAGS, None, WeightConfig(name=name))
    assert torch.equal(old, CURRENT) and not old.requires_grad


INTERPOLATED = WeightConfig(name="decoupled", cap=5.0, proximal=ProximalPolicy.INTERPOLATED)


def interpolated(current, behaviour, lags):
    found = WEIGHTS["decoupled"].proximal_of(current, behaviour, lags, None, INTERPOLATED)
    assert not found.requires_grad
    return found


@pytest.mark.parametrize("lag", [0, 1, 2, 7])
def test_where_log_probabilities_move_evenly_the_interpolated_proximal_policy_is_the_true_one(lag):
    """log π_v = −3 + v / 10 at version v. The batch starts at version 20, the update makes version 21."""
    start = 20

    def at(version):
        return torch.tensor([-3.0 + version / 10])

    found = interpolated(at(start + 1), at(start - lag), torch.tensor([lag]))
    torch.testing.assert_close(found, at(start))


@pytest.mark.parametrize("lag, share", [(0, 0.0), (1, 1 / 2), (2, 2 / 3), (4, 4 / 5)])
def test_the_share_is_areals_by_versions(lag, share):
    theta, behave = 10, 10 - (lag + 1)  # AReaL counts π_θ as the coming version, and v_prox = v_θ − 1
    assert (theta - 1 - behave) / (theta - behave) == pytest.approx(share)
    found = interpolated(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([lag]))
    assert found.item() == pytest.approx(-2.0 + share)


def test_interpolated_clip_and_weight_together_are_always_the_whole_ratio():
    proximal = interpolated(CURRENT, BEHAVIOUR, LAGS)
    kept = torch.ones(2, dtype=torch.bool)
    weight = WEIGHTS["decoupled"].weigh(proximal, BEHAVIOUR, kept, INTERPOLATED).weight
    torch.testing.assert_close((CURRENT - proximal).exp() * weight, (CURRENT - BEHAVIOUR).exp())
    assert weight[0] == 1.0, "sampled by the proximal policy itself"


def test_interpolation_needs_no_second_pass_and_survives_lags_of_tokens_nobody_sampled():
    assert not WEIGHTS["decoupled"].recomputed(INTERPOLATED)
    odd = torch.tensor([-1, 1 << 62])
    assert torch.isfinite(interpolated(CURRENT, BEHAVIOUR, odd)).all()


def test_settings_that_a_weight_does_not_read_or_that_contradict_are_refused():
    with pytest.raises(ConfigError, match=r"learner.weight.proximal must be recomputed unless"):
        WeightConfig(name="tis", proximal=ProximalPolicy.INTERPOLATED)
    with pytest.raises(ConfigError, match=r"learner.weight.floor must be 0 or more, and below"):
        WeightConfig(name="icepop", cap=2.0, floor=2.0)
