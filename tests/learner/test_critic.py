"""The value head: what it learns, and that the policy does not notice."""

import pytest
import torch

from learner.critic import ValueHead, value_loss
from learner.policy import build_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER


def test_a_value_is_linear_in_the_state_and_a_fresh_head_says_zero():
    head, states = ValueHead(3), torch.randn(4, 3)
    assert head(states).tolist() == [0.0] * 4
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, -2.0, 0.5]))
        head.bias.fill_(0.25)
    expected = states @ torch.tensor([1.0, -2.0, 0.5]) + 0.25
    assert torch.allclose(head(states), expected)


def test_the_loss_is_half_the_weighted_squared_error_and_its_gradient_the_error():
    values = torch.tensor([0.5, 0.0, 7.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([1.0, -2.0, float("nan")]), torch.tensor([0.5, 1.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * 0.5 * 0.25 + 0.5 * 4.0)
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-0.25, 2.0, 0.0])


def test_no_gradient_of_the_critic_reaches_the_policy():
    model = build_model(SMALL_MODEL, TOKENIZER, seed=0)
    hidden = model.base_model(input_ids=torch.tensor([[3, 4, 5]])).last_hidden_state
    head = ValueHead(SMALL_MODEL.hidden_size)
    values = head(hidden[0, 2:])  # not even when it is given states that have one
    value_loss(values, torch.ones(1), torch.ones(1)).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert head.weight.grad is not None and head.weight.grad.abs().sum() > 0
