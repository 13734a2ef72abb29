"""The value head: what it learns, and that the policy does not notice."""

import math

import pytest
import torch
from safetensors.torch import load as parse_tensors

from common.config_learner import CreditConfig, LossConfig
from common.errors import StorageError
from common.nouns import Tree
from learner.backend.alone import alone
from learner.credit.base import BranchCredit, branch_turns
from learner.critic import Critic, ValueHead, value_loss
from learner.passes import every_sampled_token
from learner.policy import build_model
from learner.rows import Clock, RowCounts
from learner.update import Updater
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, V0, forked_tree, learner_config


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


# ---------------------------------------------------------------------------------- the critic of the update


def critic(lr: float = 0.01) -> Critic:
    model = build_model(SMALL_MODEL, TOKENIZER, seed=3).eval()
    return Critic(alone(model, learner_config()), lr, max_tokens=64)


def see(found: Critic, *trees: Tree) -> dict[int, dict[int, float]]:
    return found.values(every_sampled_token(trees, V0))


def paid(tree: Tree, *targets: tuple[float, ...]) -> list[BranchCredit]:
    """The branches of a tree with a target for each of their turns; they are paid nothing."""
    branches = zip(tree.leaves(), targets, strict=True)
    return [
        BranchCredit(leaf, branch_turns(tree, leaf), (0.0,) * len(of), leaf.weight, of)
        for leaf, of in branches
    ]


def test_values_are_of_the_states_at_the_end_of_each_node_that_a_branch_goes_on_from():
    found, seen = critic(), []
    with torch.no_grad():
        found.head.weight.copy_(torch.linspace(-1, 1, SMALL_MODEL.hidden_size))
        found.head.bias.fill_(0.5)
    values = see(found, forked_tree(0), forked_tree(7))
    assert list(values) == [0, 7] and values[0].keys() == values[7].keys() == {0, 1}
    for walk in ([3, 4, 5], [3, 4, 5, 6, 7, 8]):  # the prompt; and with node 1, its observation included
        with torch.no_grad():
            hidden = found._backend.model.base_model(input_ids=torch.tensor([walk])).last_hidden_state
            seen.append(float(found.head(hidden[0, -1:])))
    assert [values[0][0], values[0][1]] == pytest.approx(seen, rel=1e-4)
    assert seen[0] != pytest.approx(seen[1], abs=1e-3)


def test_a_step_is_on_half_the_squared_error_of_each_sampled_turn_divided_by_prompts():
    found, tree = critic(lr=0.01), forked_tree()
    see(found, tree)
    # Node 1 is a turn of both branches, and only of the one that sampled it a term: 9 is not learnt from.
    metrics = found.learn([tree], {0: paid(tree, (1.0, -2.0), (9.0, 4.0))}, prompts=5.0)
    assert metrics["critic_loss"] == pytest.approx(0.5 * (0.5 * 1 + 0.5 * 4 + 0.25 * 16) / 5)
    assert metrics["critic_error"] == pytest.approx((1 + 2 + 4) / 3)
    # −Σ weight (V − v) = −(0.5 − 1 + 1) < 0, and AdamW's first step is the learning rate, against the sign.
    assert float(found.head.bias.detach()) == pytest.approx(0.01, rel=1e-4)


def test_many_steps_bring_values_to_their_targets():
    found, tree = critic(lr=0.05), forked_tree()
    for _ in range(150):
        see(found, tree)
        found.learn([tree], {0: paid(tree, (1.0, -0.5), (1.0, -0.5))}, prompts=1.0)
    values = see(found, tree)[0]
    assert [values[0], values[1]] == pytest.approx([1.0, -0.5], abs=0.05)


def test_a_batch_without_terms_is_no_step():
    found = critic()
    see(found, forked_tree())
    assert found.learn([forked_tree()], {0: []}, prompts=1.0) == {}
    assert found._optimizer.state == {}


def test_a_loss_that_is_not_finite_is_never_applied_and_a_value_that_is_not_is_refused():
    found, tree = critic(), forked_tree()
    see(found, tree)
    metrics = found.learn([tree], {0: paid(tree, (math.nan, 0.0), (0.0, 0.0))}, prompts=1.0)
    assert math.isnan(metrics["critic_loss"]) and found._optimizer.state == {}
    with torch.no_grad():
        found.head.bias.fill_(math.nan)
    with pytest.raises(ValueError, match=r"lower learner\.credit\.critic_lr"):
        see(found, tree)


def test_the_loss_of_the_critic_is_divided_by_the_trees_of_a_batch():
    def said(batch_trees: int) -> dict[str, float]:
        settings = learner_config(
            batch_trees=batch_trees,
            credit=CreditConfig(name="tree_vtrace", critic="head"),
            loss=LossConfig(name="reinforce", minibatches=1),
        )
        model = build_model(SMALL_MODEL, TOKENIZER, seed=3)
        up = Updater(alone(model, settings), settings, temperature=1.0)
        up.rows([forked_tree(0), forked_tree(1)], Clock(V0, 1), RowCounts())
        return up._crediting.metrics

    two, four = said(2), said(4)
    assert two["critic_loss"] > 0
    assert four["critic_loss"] == pytest.approx(two["critic_loss"] / 2)
    assert four["critic_error"] == two["critic_error"]


def test_a_critic_s_file_brings_back_its_head_and_its_moments():
    one, other, tree = critic(), critic(), forked_tree()
    targets = {0: paid(tree, (1.0, -0.5), (1.0, 3.0))}
    for _ in range(2):
        see(one, tree)
        one.learn([tree], targets, prompts=1.0)
    other.load_state(one.state_file())
    assert other.state_file() == one.state_file()
    assert see(other, tree) == see(one, tree)
    moments = {"exp_avg", "exp_avg_sq", "step", "head"}
    assert set(parse_tensors(one.state_file())) == {f"{m}/{n}" for m in moments for n in ("weight", "bias")}
    for found in (one, other):
        found.learn([tree], targets, prompts=1.0)
    assert other.state_file() == one.state_file()


def test_a_fresh_critic_s_file_is_its_head_alone_and_a_strange_one_is_refused():
    found = critic()
    assert set(parse_tensors(found.state_file())) == {"head/weight", "head/bias"}
    found.load_state(critic().state_file())
    for strange in (b"", b"no tensors at all", found.state_file()[:-4]):
        with pytest.raises(StorageError, match=r"critic\.safetensors does not fit"):
            found.load_state(strange)
    wider = critic()
    wider.head = ValueHead(SMALL_MODEL.hidden_size + 1)
    with pytest.raises(StorageError, match="does not fit"):
        found.load_state(wider.state_file())
