"""KL and entropy terms: their values, what their gradients are the gradients of, and masked positions."""

import math

import pytest
import torch

from common.config_learner import RegularizerConfig
from common.errors import ConfigError
from learner.regularizers import ESTIMATORS, entropy_bonus, reference_kl

LOGITS = torch.tensor([0.3, -1.1, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.log_softmax(torch.tensor([-0.5, 0.2, 0.1, 0.9], dtype=torch.float64), 0)
EVERY = torch.ones(4, dtype=torch.bool)


def expectation(estimator: str) -> tuple[float, torch.Tensor]:
    """(mean, mean gradient by the logits) of the term over tokens drawn from π, by enumeration."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    settings = RegularizerConfig(kl_coefficient=1.0, kl_estimator=estimator)
    terms = reference_kl(logprobs, REFERENCE, logprobs.detach().exp(), EVERY, settings)
    terms.sum().backward()  # the weight of each token is its probability
    return float(terms.detach().sum()), logits.grad


def divergence(forward: bool) -> tuple[float, torch.Tensor]:
    logits = LOGITS.clone().requires_grad_()
    logprobs = torch.log_softmax(logits, 0)
    first, second = (REFERENCE, logprobs) if forward else (logprobs, REFERENCE)
    value = (first.exp() * (first - second)).sum()
    value.backward()
    return float(value.detach()), logits.grad


def test_k1_and_k3_have_the_value_of_the_kl_and_k2_is_near_it():
    value = divergence(forward=False)[0]
    assert expectation("k1")[0] == pytest.approx(value)
    assert expectation("k3")[0] == pytest.approx(value)
    assert expectation("k2")[0] != pytest.approx(value, rel=1e-3)


def test_k2_has_the_gradient_of_the_kl():
    torch.testing.assert_close(expectation("k2")[1], divergence(forward=False)[1])


def test_k1_has_no_gradient_and_k3_that_of_the_other_direction():
    torch.testing.assert_close(expectation("k1")[1], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(expectation("k3")[1], divergence(forward=True)[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_term_is_coefficient_times_weight_times_the_estimate(estimator):
    settings = RegularizerConfig(kl_coefficient=0.5, kl_estimator=estimator)
    delta = -1.0 - -1.7
    by_hand = {"k1": delta, "k2": delta**2 / 2, "k3": math.exp(-delta) - 1 + delta}[estimator]
    found = reference_kl(
        torch.tensor([-1.0]), torch.tensor([-1.7]), torch.tensor([0.25]), torch.tensor([True]), settings
    )
    assert found.item() == pytest.approx(0.5 * 0.25 * by_hand, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_masked_nan_leaks_neither_into_the_kl_nor_into_its_gradient(estimator, poison):
    """SkyRL #1633: kl * mask is NaN where the KL is."""
    logprobs = torch.tensor([-1.0, poison], requires_grad=True)
    settings, mask = (
        RegularizerConfig(kl_coefficient=1.0, kl_estimator=estimator),
        torch.tensor([True, False]),
    )
    found = reference_kl(logprobs, torch.tensor([-1.2, poison]), torch.tensor([1.0, poison]), mask, settings)
    found.sum().backward()
    assert found[1] == 0 and torch.isfinite(found).all()
    assert torch.isfinite(logprobs.grad).all() and logprobs.grad[1] == 0


def test_a_masked_nan_leaks_neither_into_the_entropy_nor_into_its_gradient():
    entropies = torch.tensor([0.7, math.nan], requires_grad=True)
    settings = RegularizerConfig(entropy_coefficient=0.5)
    found = entropy_bonus(entropies, torch.tensor([2.0, math.nan]), torch.tensor([True, False]), settings)
    found.sum().backward()
    assert found.tolist() == pytest.approx([0.7, 0.0]) and entropies.grad.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_absurd_difference_stays_finite(estimator):
    settings = RegularizerConfig(kl_coefficient=1.0, kl_estimator=estimator)
    for policy, reference in ((0.0, -1e4), (-1e4, 0.0)):
        logprobs = torch.tensor([policy], requires_grad=True)
        found = reference_kl(
            logprobs, torch.tensor([reference]), torch.ones(1), torch.tensor([True]), settings
        )
        found.sum().backward()
        assert torch.isfinite(found).all() and torch.isfinite(logprobs.grad).all()


def test_no_gradient_flows_into_the_reference():
    reference = torch.tensor([-1.7], requires_grad=True)
    settings = RegularizerConfig(kl_coefficient=1.0)
    logprobs = torch.tensor([-1.0], requires_grad=True)
    reference_kl(logprobs, reference, torch.ones(1), torch.tensor([True]), settings).sum().backward()
    assert reference.grad is None and logprobs.grad is not None


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"kl_estimator": "k4"}, r"kl_estimator must be one of k1, k2, k3 \(did you mean"),
        ({"kl_coefficient": -0.1}, "kl_coefficient must be 0 or more, and finite"),
        ({"entropy_coefficient": math.nan}, "entropy_coefficient must be 0 or more, and finite"),
        ({"reference": "x"}, "reference must be left out unless .*kl_coefficient is positive"),
    ],
)
def test_settings_out_of_bounds_are_refused(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        RegularizerConfig(**change)
