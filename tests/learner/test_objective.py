"""The objective of a micro-batch against closed forms: signs, factors, and which policy is the proximal one.

Tokens are stale, the behaviour weight differs from 1, and all coefficients are there, so that no term can hide
behind another. Gradients are autograd's; what they must be is written out.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.config_learner import LossConfig, ProximalPolicy, RegularizerConfig, WeightConfig
from learner.objective import Objective, Parts
from learner.policy import TokenLogprobs
from tests.learner.by_hand import micro_batch
from tests.learner.helpers import learner_config

LAGS = [0, 1, 3, 2]
MU = torch.tensor([-1.0, -2.0, -0.5, -1.5])
PI = torch.tensor([-1.2, -1.6, -0.9, -1.4])
"""π / μ differs from 1, both ways."""
ENTROPY = torch.tensor([0.5, 1.5, 1.0, 2.0])
REFERENCE = torch.tensor([-1.0, -1.0, -1.0, -2.0])
START = torch.tensor([-1.1, -1.9, -0.6, -1.7])
"""log π at the start of the batch."""
UP, DOWN, WORTH = [0.3, 0.0, 0.2, 0.0], [0.0, 0.4, 0.1, 0.0], [0.5, 0.8, 0.6, 0.25]
PAID = torch.tensor(UP) - torch.tensor(DOWN)
"""Σ weight · A of each token; the last is paid nothing."""
NONE, BOTH = RegularizerConfig(), RegularizerConfig(kl_coefficient=0.3, entropy_coefficient=0.2)


def objective(
    weight: WeightConfig, terms: RegularizerConfig, loss: str = "reinforce", start: Tensor | None = START
) -> tuple[Parts, Tensor, Tensor | None]:
    """Its parts and its gradients with respect to log π and to the entropies."""
    settings = learner_config(weight=weight, regularizer=terms, loss=LossConfig(name=loss, minibatches=2))
    batch = micro_batch(MU.tolist(), LAGS, UP, DOWN, WORTH)
    logprobs, entropies = PI.clone().requires_grad_(), ENTROPY.clone().requires_grad_()
    reference = REFERENCE if terms.kl_coefficient else None
    parts = Objective(settings)(batch, TokenLogprobs(logprobs, entropies), start, reference)
    by_logprobs, by_entropies = torch.autograd.grad(parts.total, (logprobs, entropies), allow_unused=True)
    return parts, by_logprobs, by_entropies


def same(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    torch.testing.assert_close(found.detach(), expected, rtol=1e-5, atol=1e-6)


CORRECTED = [
    (WeightConfig(name="none"), torch.ones(4)),
    (WeightConfig(name="tis", cap=1.05), torch.exp(START - MU).clamp(max=1.05)),
    (WeightConfig(name="icepop", cap=1.05, floor=0.85), torch.tensor([0.904837, 0.0, 0.904837, 0.0])),
    (WeightConfig(name="decoupled", cap=1.05), torch.tensor([0.904837, 0.0, 0.904837, 0.818731])),
]


@pytest.mark.parametrize("weight, factor", CORRECTED, ids=lambda value: getattr(value, "name", ""))
def test_the_behaviour_weight_multiplies_the_policy_loss_and_nothing_else(
    weight: WeightConfig, factor: Tensor
) -> None:
    parts, by_logprobs, by_entropies = objective(weight, BOTH)
    worth, gap = torch.tensor(WORTH), PI - REFERENCE
    same(parts.weight.weight, factor)
    same(by_logprobs, -factor * PAID + 0.3 * worth * gap)  # k2: its gradient is the log-ratio
    same(by_entropies, -0.2 * worth)
    terms = 0.3 * worth * gap**2 / 2 - 0.2 * worth * ENTROPY
    same(parts.total, (-factor * PAID * PI + terms).sum())
    same(parts.kl, 0.3 * worth * gap**2 / 2)


def test_a_step_down_the_objective_raises_the_entropy_and_nears_the_reference() -> None:
    _, by_logprobs, by_entropies = objective(WeightConfig(name="tis"), BOTH)
    _, unregularised, _ = objective(WeightConfig(name="tis"), NONE)
    assert by_entropies is not None and bool((by_entropies < 0).all())
    towards = torch.sign(by_logprobs - unregularised)
    assert torch.equal(towards, torch.sign(PI - REFERENCE)), "down where likelier than in the reference"


def test_without_coefficients_the_objective_is_the_weighted_policy_loss_alone() -> None:
    parts, by_logprobs, by_entropies = objective(WeightConfig(name="tis"), NONE)
    assert parts.kl is None and by_entropies is None
    same(by_logprobs, -torch.exp(START - MU) * PAID)


@pytest.mark.parametrize("name, old", [("none", MU), ("tis", START), ("decoupled", START)])
def test_the_ratio_of_the_loss_is_against_the_behaviour_or_the_proximal_policy(
    name: str, old: Tensor
) -> None:
    parts, by_logprobs, _ = objective(WeightConfig(name=name, cap=5.0), NONE, "ppo")
    same(parts.old, old)
    factor = torch.ones(4) if name == "none" else torch.exp(START - MU)
    ratio = torch.exp(PI - old)
    through = torch.where(ratio > 1.2, 0.0, torch.tensor(UP)) - torch.where(
        ratio < 0.8, 0.0, torch.tensor(DOWN)
    )
    same(by_logprobs, -factor * ratio * through)


def test_before_the_first_step_the_proximal_policy_is_the_current_one() -> None:
    parts, by_logprobs, _ = objective(WeightConfig(name="tis", cap=5.0), NONE, "ppo", start=None)
    same(parts.old, PI)
    same(by_logprobs, -torch.exp(PI - MU) * PAID)


@pytest.mark.parametrize("start", [START, None], ids=["recomputed too", "no pass"])
def test_the_interpolated_proximal_policy_is_given_the_lag_of_each_token(start: Tensor | None) -> None:
    weight = WeightConfig(name="decoupled", cap=5.0, proximal=ProximalPolicy.INTERPOLATED)
    parts, by_logprobs, _ = objective(weight, NONE, start=start)
    share = torch.tensor([0 / 1, 1 / 2, 3 / 4, 2 / 3])  # lag / (lag + 1)
    same(parts.weight.weight, torch.exp(PI - MU) ** share)
    same(parts.old, MU + share * (PI - MU))
    same(by_logprobs, -(torch.exp(PI - MU) ** share) * PAID)
