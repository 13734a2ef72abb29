"""The update with every loss and regulariser, packed and not, alone and shared out among ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import BEHAVIOUR_WEIGHTS, Config, validate
from common.config import CREDITS as CREDIT_NAMES
from common.config_learner import (
    CREDIT_DEMANDS,
    LOSS_WEIGHTS,
    CreditConfig,
    GroupFilterConfig,
    LearnerConfig,
    LossConfig,
    NodeWeight,
    Packing,
    ProximalPolicy,
    RegularizerConfig,
    WeightConfig,
)
from common.errors import ConfigError
from common.nouns import Tree, Version
from learner.backend.alone import alone
from learner.credit import CREDITS
from learner.loss import LOSSES
from learner.policy import build_model, token_logprobs
from learner.reference import Reference
from learner.rows import Clock, RowCounts
from learner.update import Updater
from learner.weight import WEIGHTS
from tests.learner.helpers import (
    SMALL_MODEL,
    TOKENIZER,
    V0,
    continuation,
    flat_tree,
    forked_tree,
    learner_config,
    make_tree,
    node,
    turn,
)

CLOCK = Clock(V0, max_lag=1)


def trees() -> list[Tree]:
    return [flat_tree(0, np.random.default_rng(0)), *(forked_tree(number) for number in (1, 2, 3))]


def shown_tree(tree_id: int, versions: Sequence[tuple[Version, int]]) -> Tree:
    """A demonstration, an unlikely one: whatever counts its tokens is far from the others."""
    shown = [turn((6, 7, 8), (9,), (), versions), turn((10, 11, 12), (), (), versions)]
    nodes = [node(1, 0, 0, 0, shown[0], value=0.25), node(2, 1, 0, 1, shown[1], depth=2)]
    return make_tree(nodes, [continuation(0, [1, 2], 1.0, baseline=0.5)], tree_id)


def updater(settings: LearnerConfig, *, rank: int = 0, world: int = 1) -> Updater:
    backend = alone(build_model(SMALL_MODEL, TOKENIZER, seed=3), settings)
    backend.rank, backend.world = rank, world
    reference = None
    if settings.regularizer.kl_coefficient:
        reference = Reference(build_model(SMALL_MODEL, TOKENIZER, seed=4), token_logprobs, 1.0)
    return Updater(backend, settings, temperature=1.0, reference=reference)


def gradient(settings: LearnerConfig, **more: int) -> Tensor:
    """Of the batch, before the clip, flat."""
    up = updater(settings, **more)
    rows = up.rows(trees(), CLOCK, RowCounts())
    up._accumulate(rows, range(len(rows)), None, CLOCK.max_lag, None)
    found = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for parameter in up._backend.model.parameters()
    ]
    return torch.cat([part.flatten() for part in found])


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= 1e-5 * float(other.norm())


def losses(name: str) -> LossConfig:
    return LossConfig(name=name, clip_low=0.1, clip_high=0.1, minibatches=1)


@pytest.mark.parametrize("node_weight", NodeWeight)
@pytest.mark.parametrize("name", LOSSES)
def test_packed_trees_give_the_gradient_of_branch_by_branch_training(
    name: str, node_weight: NodeWeight
) -> None:
    def settings(packing: Packing) -> LearnerConfig:
        return learner_config(loss=losses(name), node_weight=node_weight, packing=packing)

    rows = gradient(settings(Packing.ROWS))
    assert float(rows.norm()) > 0
    assert close(gradient(settings(Packing.TREE)), rows)


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_regularisers_are_the_same_packed_and_not(packing: Packing, kl: str) -> None:
    def settings(tokens: int, packing: Packing) -> LearnerConfig:
        terms = RegularizerConfig(kl_coefficient=0.3, kl_estimator=kl, entropy_coefficient=0.1)
        return learner_config(
            regularizer=terms, node_weight=NodeWeight.LEAF_SHARE, packing=packing, micro_batch_tokens=tokens
        )

    whole = gradient(settings(10_000, Packing.ROWS))
    without = gradient(learner_config(node_weight=NodeWeight.LEAF_SHARE, packing=Packing.ROWS))
    assert not close(without, whole), "the terms have a gradient"
    assert close(gradient(settings(40, packing)), whole)


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_of_all_ranks_add_up_to_that_of_one(name: str, world: int) -> None:
    settings = learner_config(loss=losses(name), micro_batch_tokens=20, packing=Packing.TREE)
    parts = [gradient(settings, rank=rank, world=world) for rank in range(world)]
    assert sum(float(part.norm()) > 0 for part in parts) > 1
    assert close(torch.stack(parts).sum(0), gradient(settings))


def test_every_rank_takes_part_in_every_round_with_a_micro_batch_or_without() -> None:
    for world in (1, 2, 3, 5):
        for count in range(8):
            shares = [
                list(updater(learner_config(), rank=rank, world=world)._my_share(iter(range(count))))  # type: ignore[arg-type]
                for rank in range(world)
            ]
            assert {len(share) for share in shares} == {math.ceil(count / world)}
            done = sorted(place for share in shares for place in share if place is not None)
            assert done == list(range(count))


def vtrace(critic: str) -> LearnerConfig:
    credit = CreditConfig(name="tree_vtrace", critic=critic, critic_lr=0.003)
    return learner_config(credit=credit, loss=losses("reinforce"))


def test_vtrace_is_paid_by_the_ratios_of_the_current_weights() -> None:
    same, moved = updater(vtrace("grant")), updater(vtrace("grant"))
    with torch.no_grad():
        for parameter in moved._backend.model.parameters():
            parameter.mul_(1.5)
    one, other = (up.rows(trees(), CLOCK, RowCounts()) for up in (same, moved))
    assert any(not np.allclose(a.advantages, b.advantages) for a, b in zip(one, other, strict=True))


def test_a_value_head_learns_and_leaves_the_policy_alone() -> None:
    up = updater(vtrace("head"))
    before = [parameter.detach().clone() for parameter in up._backend.model.parameters()]
    losses = []
    for _ in range(20):
        up.rows(trees(), CLOCK, RowCounts())
        losses.append(up._crediting.metrics["critic_loss"])
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(*pair) for pair in zip(before, up._backend.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in up._backend.model.parameters())


def test_a_value_head_goes_on_from_its_file_as_if_it_had_never_stopped() -> None:
    one, other = updater(vtrace("head")), updater(vtrace("head"))
    for _ in range(3):
        one.rows(trees(), CLOCK, RowCounts())
    other.load_state(one.state_files())
    for _ in range(2):
        for up in (one, other):
            up.rows(trees(), CLOCK, RowCounts())
    assert one.state_files() == other.state_files()


def test_filtered_prompts_give_no_gradient_and_are_counted() -> None:
    settings = learner_config(filter=GroupFilterConfig(name="mixed"))
    up = updater(settings)
    uniform = [flat_tree(0, np.random.default_rng(0), rewards=[1.0] * 4), forked_tree(1)]
    report = up.update(uniform, CLOCK)
    assert report.metrics["filtered_groups"] == 0.5
    assert report.counts.tokens_without_contrast == uniform[0].num_action_tokens()


def test_what_is_paid_nothing_is_trained_where_a_term_asks_for_it() -> None:
    uniform = [flat_tree(0, np.random.default_rng(0), rewards=[0.35] * 4)]
    idle = updater(learner_config(credit=CreditConfig(name="grpo"))).update(uniform, CLOCK)
    assert idle.metrics["grad_norm"] == 0.0 and idle.counts.tokens_trained == 0
    terms = RegularizerConfig(entropy_coefficient=0.1)
    busy = updater(learner_config(credit=CreditConfig(name="grpo"), regularizer=terms)).update(uniform, CLOCK)
    assert busy.metrics["grad_norm"] > 0
    assert busy.counts.tokens_trained == uniform[0].num_action_tokens()


# ----------------------------------------------------------------------------- every combination of choices

CHOICES = [
    (loss, weight, credit) for loss in LOSS_WEIGHTS for weight in BEHAVIOUR_WEIGHTS for credit in CREDIT_NAMES
]


def chosen(loss: str, weight: str, credit: str, **more: str) -> LearnerConfig:
    """Two optimiser steps a batch, so that a proximal policy is another than the current one."""
    return learner_config(
        loss=LossConfig(name=loss, minibatches=2),
        weight=WeightConfig(name=weight),
        credit=CreditConfig(name=credit, **more),  # type: ignore[arg-type]
    )


def is_allowed(loss: str, weight: str, credit: str) -> bool:
    return weight in LOSS_WEIGHTS[loss] and CREDIT_DEMANDS.get(credit, (loss, weight)) == (loss, weight)


def test_the_tables_name_what_there_is() -> None:
    assert set(LOSS_WEIGHTS) == set(LOSSES) and set(CREDIT_NAMES) == set(CREDITS)
    assert {weight for allowed in LOSS_WEIGHTS.values() for weight in allowed} == set(WEIGHTS)
    assert sum(is_allowed(*each) for each in CHOICES) == 18 * 5 + 1


@pytest.mark.parametrize("loss, weight, credit", CHOICES)
def test_every_combination_trains_or_is_refused_with_a_reason(loss: str, weight: str, credit: str) -> None:
    settings = chosen(loss, weight, credit)
    if not is_allowed(loss, weight, credit):
        with pytest.raises(ConfigError) as refused:
            validate(Config(learner=settings))
        sentence = str(refused.value)
        assert sentence.startswith(("learner.loss", "learner.weight")) and "\n" not in sentence
        assert f"learner.loss={loss}" in sentence or f"learner.credit={credit}" in sentence
        return
    validate(Config(learner=settings))
    trains(settings)


def trains(settings: LearnerConfig) -> None:
    """One update moves the weights, stays finite and says nothing but numbers."""
    up = updater(settings)
    before = [parameter.detach().clone() for parameter in up._backend.model.parameters()]
    report = up.update(trees(), CLOCK)
    assert (report.minibatches, report.minibatches_skipped) == (2, 0)
    assert {name for name, value in report.metrics.items() if not math.isfinite(value)} == set()
    after = [*up._backend.model.parameters()]
    assert all(bool(torch.isfinite(parameter).all()) for parameter in after)
    assert not all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    "settings",
    [
        chosen("reinforce", "none", "tree_vtrace", critic="head"),
        chosen("ppo", "none", "edge", node_value="leaves", edge_weight="path"),
        learner_config(
            loss=LossConfig(minibatches=2, dual_clip=3.0),
            weight=WeightConfig(name="decoupled", proximal=ProximalPolicy.INTERPOLATED),
        ),
        learner_config(
            loss=LossConfig(minibatches=2), credit=CreditConfig(name="rloo"),
            filter=GroupFilterConfig(name="mixed"),
            regularizer=RegularizerConfig(kl_coefficient=0.1, entropy_coefficient=0.01),
        ),
    ],
    ids=["value head", "leaves of edges", "interpolated", "all terms"],
)  # fmt: skip
def test_the_other_options_train_too(settings: LearnerConfig) -> None:
    validate(Config(learner=settings))
    trains(settings)


def test_an_update_says_what_the_documentation_promises() -> None:
    settings = chosen("ppo", "decoupled", "granted")
    metrics = updater(settings).update(trees(), CLOCK).metrics
    assert {
        "ratio_ess", "ratio_q01", "ratio_q50", "ratio_q99", "clip_fraction", "weight_limited_fraction",
        "drop_fraction", "kl_behaviour", "entropy", "lag_share_0", "lag_share_1", "logprob_gap", "grad_norm",
        "rifb", "advantage_mass", "trees_without_gradient", "rows_trained", "loss", "lr",
    } <= set(metrics)  # fmt: skip


# ------------------------------------------------------------------------------------------ demonstrations

OF_TREES = ("rifb", "advantage_mass", "trees_of_mixed_versions", "trees_without_gradient")
"""Metrics over all trees of a batch, demonstrations included, whether or not their tokens are trained."""


@pytest.mark.parametrize("versions", [[], [(V0, 3)]], ids=["of nobody", "with versions"])
@pytest.mark.parametrize(
    "credit",
    [CreditConfig(), CreditConfig(name="tree_vtrace"), CreditConfig(name="tree_vtrace", critic="head")],
    ids=lambda credit: f"{credit.name}-{credit.critic}",
)
def test_no_diagnostic_counts_the_tokens_of_demonstrations(
    credit: CreditConfig, versions: list[tuple[Version, int]]
) -> None:
    """Sample size, quantiles, ages, clips, the critic's error: those of the sampled tokens alone."""
    loss, _ = CREDIT_DEMANDS.get(credit.name, ("ppo", "none"))
    settings = learner_config(credit=credit, loss=LossConfig(name=loss, minibatches=1))
    sampled, mixed = (
        updater(settings).update(found, CLOCK)
        for found in (trees(), [*trees(), shown_tree(4, versions), shown_tree(5, versions)])
    )
    assert mixed.counts.tokens_demonstrated == 12 and sampled.counts.tokens_demonstrated == 0
    assert mixed.counts.tokens_trained == sampled.counts.tokens_trained > 0
    expected, got = (
        {name: value for name, value in each.metrics.items() if not name.startswith(OF_TREES)}
        for each in (sampled, mixed)
    )
    assert {"ratio_ess", "ratio_q99", "lag_share_0", "clip_fraction", "entropy"} <= expected.keys()
    assert ("critic_error" in expected) == (credit.critic == "head")
    assert got == pytest.approx(expected, rel=1e-5)
