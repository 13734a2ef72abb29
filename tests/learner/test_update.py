"""The update: its gradient against a slow oracle, and what it must not depend on."""

import math

import numpy as np
import pytest
import torch

from common.config_learner import (
    CreditConfig,
    LearnerConfig,
    LossConfig,
    NodeWeight,
    OptimizerConfig,
    WeightConfig,
)
from common.nouns import Tree, Version
from learner.backend.alone import alone
from learner.batching import of_rows
from learner.credit import CREDITS, NO_EVIDENCE
from learner.loss import LOSSES
from learner.passes import known_tokens
from learner.policy import build_model
from learner.rows import Clock, RowCounts
from learner.update import Updater, warmed_up_lr
from learner.weight import WEIGHTS
from tests.learner.helpers import (
    SMALL_MODEL,
    TOKENIZER,
    V0,
    continuation,
    flat_tree,
    flat_trees,
    forked_tree,
    learner_config,
    make_tree,
    node,
    turn,
)

CLOCK = Clock(V0, max_lag=1)


def batch(seed: int = 0, count: int = 4) -> list[Tree]:
    return flat_trees(count, seed)


def updater(settings: LearnerConfig, *, temperature: float = 1.0, deterministic: bool = False):
    model = build_model(SMALL_MODEL, TOKENIZER, seed=3)
    backend = alone(model, settings)
    return model, Updater(backend, settings, temperature=temperature, deterministic=deterministic)


def gradient(settings: LearnerConfig, trees: list[Tree], *, deterministic: bool = False, **more):
    """Gradient of the batch before clipping, flat."""
    model, up = updater(settings, deterministic=deterministic, **more)
    rows = [row for row in up.rows(trees, CLOCK, RowCounts()) if row.has_gradient()]
    up._accumulate(rows, range(len(rows)), None, CLOCK.max_lag, None)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def gradient_oracle(settings: LearnerConfig, trees: list[Tree], temperature: float) -> torch.Tensor:
    """Branch by branch, one token at a time, full logits: what the objective says, written out."""
    model = build_model(SMALL_MODEL, TOKENIZER, seed=3)
    total = torch.zeros(())
    for tree in trees:
        for credit in CREDITS[settings.credit.name].function(tree, settings.credit, NO_EVIDENCE):
            ids = list(np.frombuffer(tree.nodes[0].turn.observation, "<i4"))
            for made, advantage in zip(credit.turns, credit.advantages, strict=True):
                behaviour = np.frombuffer(made.turn.logprobs, "<f4")
                for token, mu in zip(np.frombuffer(made.turn.action, "<i4"), behaviour, strict=True):
                    logits = (
                        model(input_ids=torch.tensor([[int(i) for i in ids]])).logits[0, -1] / temperature
                    )
                    logprob = torch.log_softmax(logits, -1)[int(token)]
                    if settings.weight.name == "none":
                        r, w = torch.exp(logprob - float(mu)), 1.0
                    else:
                        r, w = (
                            torch.exp(logprob - logprob.detach()),
                            math.exp(float(logprob.detach()) - float(mu)),
                        )
                        if w > settings.weight.cap:
                            w = settings.weight.cap if settings.weight.name == "tis" else 0.0
                        elif settings.weight.name == "icepop" and w < settings.weight.floor:
                            w = 0.0
                    clipped = torch.clamp(r, 1 - settings.loss.clip_low, 1 + settings.loss.clip_high)
                    token_loss = -torch.minimum(r * advantage, clipped * advantage)
                    if made.lease == credit.continuation.number:
                        total = total + credit.weight * w * token_loss
                    ids.append(int(token))
                ids += list(np.frombuffer(made.turn.observation, "<i4"))
    (total / settings.batch_trees).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("credit", [name for name, method in CREDITS.items() if not method.needs_ratios])
def test_the_gradient_equals_the_objective_written_out_token_by_token(weight, credit):
    settings = learner_config(
        weight=WeightConfig(name=weight, cap=1.5),
        credit=CreditConfig(name=credit),
        loss=LossConfig(clip_low=0.3, clip_high=0.5, minibatches=1),
    )
    trees = [*batch(count=2), forked_tree(2)]
    expected = gradient_oracle(settings, trees, temperature=0.8)
    torch.testing.assert_close(gradient(settings, trees, temperature=0.8), expected, rtol=2e-4, atol=2e-6)


def test_the_gradient_does_not_depend_on_the_cut_into_micro_batches():
    whole = gradient(learner_config(micro_batch_tokens=100_000), batch())
    for tokens in (1, 17, 64):
        torch.testing.assert_close(
            gradient(learner_config(micro_batch_tokens=tokens), batch()), whole, rtol=1e-4, atol=1e-6
        )
    one_by_one = gradient(learner_config(), batch(), deterministic=True)
    torch.testing.assert_close(one_by_one, whole, rtol=1e-4, atol=1e-6)


def test_the_gradient_does_not_depend_on_the_order_in_which_trees_arrived():
    assert torch.equal(gradient(learner_config(), batch()), gradient(learner_config(), batch()[::-1]))


def test_the_denominator_is_the_constant_number_of_prompts():
    one = gradient(learner_config(batch_trees=1), batch(count=1))
    eighth = gradient(learner_config(batch_trees=8), batch(count=1))
    torch.testing.assert_close(one / 8, eighth, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_masked_positions_hold_has_no_effect(poison):
    clean, dirty = updater(learner_config())[1], updater(learner_config())[1]
    rows = clean.rows(batch(), CLOCK, RowCounts())
    spoilt = dirty.rows(batch(), CLOCK, RowCounts())
    for row in spoilt:
        for stream in (row.behaviour, row.advantages, row.weights):
            stream[~row.trained] = poison
    losses = [
        up._accumulate(kept, range(len(kept)), None, 1, None) for up, kept in ((clean, rows), (dirty, spoilt))
    ]
    assert losses[0] == losses[1]
    for mine, other in zip(clean._backend.model.parameters(), dirty._backend.model.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_rows_without_gradient_are_skipped_before_the_forward_pass_and_change_nothing():
    rng = np.random.default_rng(5)
    trees = [
        flat_tree(0, rng, rewards=[1.0, 0.0, 1.0, 0.0]),
        flat_tree(1, rng, rewards=[1.0] * 4),  # grpo: no contrast
    ]
    settings = learner_config(credit=CreditConfig(name="grpo"))
    model, up = updater(settings)
    report = up.update(trees, CLOCK)
    assert (report.metrics["rows_trained"], report.metrics["rows_without_gradient"]) == (4, 4)
    alone_model, alone = updater(settings)
    alone.update(trees[:1], CLOCK)
    assert up.computed_tokens == alone.computed_tokens
    assert report.counts.tokens_trained == trees[0].num_action_tokens()
    assert report.counts.tokens_without_contrast == trees[1].num_action_tokens()
    for mine, other in zip(model.parameters(), alone_model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_batch_without_any_gradient_still_counts_and_keeps_the_weights():
    rng = np.random.default_rng(5)
    model, up = updater(learner_config(credit=CreditConfig(name="grpo")))
    before = [parameter.clone() for parameter in model.parameters()]
    report = up.update([flat_tree(0, rng, rewards=[0.35] * 4)], CLOCK)
    assert report.applied and report.metrics["grad_norm"] == 0.0 and report.metrics["loss"] == 0.0
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_learning_rate_zero_leaves_the_weights_bit_identical():
    model, up = updater(learner_config(optimizer=OptimizerConfig(lr=0.0, warmup_steps=0)))
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(3):
        assert up.update(batch(), CLOCK).metrics["grad_norm"] > 0
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_updates_make_rewarded_actions_likelier():
    trees = [
        make_tree(
            [node(1, 0, 0, 0, turn((6,), logprobs=(-3.2,))), node(2, 0, 1, 0, turn((7,), logprobs=(-3.2,)))],
            [continuation(0, [1], 1.0, baseline=0.5), continuation(1, [2], 0.0, baseline=0.5)],
            number,
        )
        for number in range(4)
    ]
    model, up = updater(learner_config())
    for _ in range(5):
        up.update(trees, CLOCK)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1], -1)
    assert logprobs[6] > logprobs[7] + 0.5


@pytest.mark.parametrize("weight", WEIGHTS)
def test_more_passes_and_minibatches_run_and_keep_the_proximal_policy_of_the_batch_start(weight):
    settings = learner_config(weight=WeightConfig(name=weight), loss=LossConfig(epochs=2, minibatches=2))
    _, up = updater(settings)
    rows = up.rows(batch(), CLOCK, RowCounts())
    proximal = known_tokens(up._every(rows), up._logprobs)
    for place, row in enumerate(rows):
        one = of_rows(rows, [place])
        there = up._forward(one).logprobs.detach()
        torch.testing.assert_close(proximal.at(one.keys_N), there, rtol=1e-4, atol=1e-5)
        assert len(there) == row.trained.sum()
    report = up.update(batch(), CLOCK)
    assert report.applied and math.isfinite(report.metrics["loss"])


def test_minibatches_are_parts_of_the_trees_and_together_all_of_them():
    settings = learner_config(loss=LossConfig(minibatches=3))
    _, up = updater(settings)
    rows = up.rows(batch(), CLOCK, RowCounts())
    epochs, parts = zip(*up._minibatches(rows, batch(), step=0), strict=True)
    assert set(epochs) == {0}
    assert sorted(place for part in parts for place in part) == list(range(len(rows)))
    trees = [{rows[place].tree for place in part} for part in parts]
    assert sum(map(len, trees)) == len(set.union(*trees)) == 4


def test_a_gradient_that_is_not_finite_is_never_applied():
    model, up = updater(learner_config())
    before = [parameter.clone() for parameter in model.parameters()]
    with torch.no_grad():
        next(model.parameters())[5, 0] = math.nan
    before[0] = next(model.parameters()).clone()
    report = up.update(batch(), CLOCK)
    assert not report.applied
    assert (report.minibatches, report.minibatches_skipped) == (1, 1)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(torch.nan_to_num(old, 9.0), torch.nan_to_num(new, 9.0))


@pytest.mark.parametrize("spoilt", range(4))
def test_a_gradient_that_is_not_finite_in_one_part_is_counted_and_the_other_parts_are_applied(spoilt):
    model, up = updater(learner_config(loss=LossConfig(minibatches=4)))
    before = [parameter.clone() for parameter in model.parameters()]
    rows = up.rows(batch(), CLOCK, RowCounts())
    for row in rows:
        if row.tree == spoilt:
            row.advantages[row.trained] = math.nan
    up.rows = lambda trees, clock, counts: rows
    report = up.update(batch(), CLOCK)
    assert (report.minibatches, report.minibatches_skipped, report.applied) == (4, 1, False)
    assert math.isnan(report.metrics["grad_norm"]), "wherever among the norms it was"
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_part_without_trees_is_no_step_on_momentum_alone():
    settings = learner_config(loss=LossConfig(epochs=2, minibatches=3))
    model, up = updater(settings)
    report = up.update(batch(count=2), CLOCK)
    assert (report.minibatches, report.minibatches_skipped) == (4, 0)
    state = up._backend.optimizer.state[next(model.parameters())]
    assert int(state["step"]) == 4  # two parts in each of two epochs


def test_more_parts_than_trees_are_as_many_as_there_are_trees():
    """The prompts of an optimiser step are those of the parts there are: no part is worth more for it."""

    def report(minibatches: int):
        model, up = updater(learner_config(batch_trees=2, loss=LossConfig(minibatches=minibatches)))
        found = up.update(batch(count=2), CLOCK)
        return found.metrics["loss"], found.metrics["grad_norm"], list(model.parameters())

    loss, norm, weights = report(2)
    assert loss != 0 and norm > 0
    for minibatches in (4, 8):
        other_loss, other_norm, others = report(minibatches)
        assert (other_loss, other_norm) == (loss, norm)
        assert all(map(torch.equal, weights, others))


def test_a_batch_of_no_trees_changes_nothing():
    model, up = updater(learner_config())
    before = [parameter.clone() for parameter in model.parameters()]
    report = up.update([], CLOCK)
    assert (report.minibatches, report.metrics["grad_norm"], report.metrics["loss"]) == (0, 0.0, 0.0)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_diagnostics_describe_ratios_lag_and_mismatch():
    _, up = updater(learner_config())
    old = Version(lineage=0, step=0)
    new = Version(lineage=0, step=1)
    rng = np.random.default_rng(2)
    trees = [flat_tree(0, rng, version=old), flat_tree(1, rng, version=new)]
    metrics = up.update(trees, Clock(new, max_lag=1)).metrics
    assert metrics["lag_share_0"] + metrics["lag_share_1"] == pytest.approx(1)
    assert 0 < metrics["ratio_ess"] <= 1
    assert metrics["ratio_q01"] <= metrics["ratio_q50"] <= metrics["ratio_q99"] <= metrics["ratio_max"]
    assert metrics["entropy"] == pytest.approx(math.log(24), rel=0.05)
    assert metrics["logprob_gap"] > 0


def test_the_mismatch_between_trainer_and_engine_is_measured_before_the_weights_move():
    settings = learner_config(
        loss=LossConfig(minibatches=4), optimizer=OptimizerConfig(lr=1.0, warmup_steps=0)
    )
    _, up = updater(settings)
    rows = up.rows(batch(), CLOCK, RowCounts())
    exact = known_tokens(up._every(rows), up._logprobs)
    for place, row in enumerate(rows):  # as if the engine had computed what the trainer does
        row.behaviour[row.trained] = exact.at(of_rows(rows, [place]).keys_N).numpy()
    up.rows = lambda trees, clock, counts: rows
    metrics = up.update(batch(), CLOCK).metrics
    assert metrics["logprob_gap_max"] < 1e-4 < abs(metrics["ratio_max"] - 1)


def test_warm_up_is_linear_and_then_constant():
    settings = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [warmed_up_lr(settings, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert warmed_up_lr(OptimizerConfig(lr=1.0, warmup_steps=0), 0) == 1.0


@pytest.mark.parametrize("node_weight", NodeWeight)
def test_every_node_weight_trains(node_weight):
    _, up = updater(learner_config(node_weight=node_weight))
    assert up.update([forked_tree(number) for number in range(4)], CLOCK).metrics["grad_norm"] > 0


def test_the_registries_hold_what_the_configuration_offers():
    from common.config import BEHAVIOUR_WEIGHTS
    from common.config import CREDITS as CREDIT_NAMES
    from common.config import LOSSES as LOSS_NAMES

    assert (set(CREDITS), set(LOSSES), set(WEIGHTS)) == (
        set(CREDIT_NAMES), set(LOSS_NAMES), set(BEHAVIOUR_WEIGHTS),
    )  # fmt: skip
