"""The control that must learn nothing, and the numbers of a step."""

import logging

import numpy as np
import pytest

from learner.backend.alone import alone
from learner.controls import shuffle_rewards
from learner.diagnostics import effective_sample_size
from learner.policy import build_model
from learner.queue import Drop
from learner.report import PROGRESS, Stopwatch, dropped_metrics, log_step, outcome_metrics, step_metrics
from learner.rows import Clock
from learner.update import Updater
from tests.learner.helpers import (
    SMALL_MODEL,
    TOKENIZER,
    V0,
    continuation,
    flat_tree,
    flat_trees,
    learner_config,
    make_tree,
    node,
    turn,
)


def trees(count: int = 6):
    return flat_trees(count, seed=1)


def outcomes(some):
    return [leaf.outcome for tree in some for leaf in tree.leaves()]


# ---------------------------------------------------------------------------------------- shuffled rewards


def test_shuffling_moves_outcomes_across_the_batch_and_changes_nothing_else():
    before, after = trees(), shuffle_rewards(trees(), run_seed=0, step=4)
    key = lambda outcome: outcome.reward  # noqa: E731
    assert sorted(outcomes(before), key=key) == sorted(outcomes(after), key=key)
    assert outcomes(before) != outcomes(after)
    assert [tree.nodes for tree in before] == [tree.nodes for tree in after]
    for old, new in zip(before, after, strict=True):
        assert [c.baseline for c in old.continuations] == [c.baseline for c in new.continuations]


def test_shuffling_is_drawn_from_seed_and_step_and_not_from_the_order_of_arrival():
    assert shuffle_rewards(trees(), 0, 4) == shuffle_rewards(trees()[::-1], 0, 4)
    assert shuffle_rewards(trees(), 0, 4) != shuffle_rewards(trees(), 0, 5)
    assert shuffle_rewards(trees(), 0, 4) != shuffle_rewards(trees(), 1, 4)


def test_shuffling_never_pays_a_continuation_without_outcome():
    tree = make_tree(
        [node(1, 0, 0, 0, turn((5,))), node(2, 0, 1, 0, turn((6,)))],
        [continuation(0, [1], None), continuation(1, [2], 1.0)],
    )
    for step in range(5):
        (shuffled,) = shuffle_rewards([tree], 0, step)
        assert [c.outcome is None for c in shuffled.continuations] == [True, False]


# -------------------------------------------------------------------------------------------------- numbers


def test_success_is_over_continuations_and_mixed_is_over_prompts_by_raw_reward():
    rng = np.random.default_rng(0)
    some = [flat_tree(0, rng, rewards=[1, 1, 1, 1]), flat_tree(1, rng, rewards=[1, 0, 0, 0])]
    assert outcome_metrics(some) == {"success": 5 / 8, "mixed": 0.5, "continuations": 8}
    assert outcome_metrics([])["success"] == 0.0


def test_what_stale_trees_were_like_is_the_mean_over_their_branches_and_nothing_where_there_were_none():
    drops = [
        Drop(0, "stale", 12, branches=3, branch_turns=3, branch_tokens=9, branch_reward=3.0),
        Drop(1, "stale", 5, branches=1, branch_turns=5, branch_tokens=11, branch_reward=0.0),
    ]
    assert dropped_metrics(drops) == {
        "dropped_tree_branches": 4,
        "dropped_tree_success": 0.75,
        "dropped_tree_turns": 2.0,
        "dropped_tree_tokens": 5.0,
    }
    assert dropped_metrics([]) == {}


def test_the_effective_sample_size_is_1_for_equal_weights_and_1_over_n_for_one_that_carries_all():
    import torch

    assert effective_sample_size(torch.full((8,), 3.0)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([1.0, 2, 3])) == pytest.approx(36 / (3 * 14))


def test_a_step_says_everything_it_should_in_numbers_and_in_one_line(caplog):
    model = build_model(SMALL_MODEL, TOKENIZER, seed=0)
    settings = learner_config()
    updater = Updater(alone(model, settings), settings, temperature=1.0)
    batch = trees(4)
    report = updater.update(batch, Clock(V0, 1))
    watch = Stopwatch()
    watch.spend("wait_trees_s", 1.5)
    metrics = step_metrics(batch, report, watch.lap(), {"stale": 2})
    for name in (
        "success", "mixed", "loss", "grad_norm", "clip_fraction", "ratio_ess", "ratio_q50", "lag_share_0",
        "entropy", "logprob_gap", "tokens_trained", "tokens_generated", "tokens_stale", "wait_trees_s",
        "trees_dropped_stale", "step_s", "tokens_without_contrast", "minibatches_skipped", "drop_fraction",
        "kl_behaviour", "rifb", "advantage_mass", "tokens_demonstrated",
    ):  # fmt: skip
        assert name in metrics, name
    with caplog.at_level(logging.INFO, logger="treeward.learner"):
        log_step(3, 10, metrics)
    record = caplog.records[-1]
    assert record.getMessage().startswith("step 3/10  success ") and "\n" not in record.getMessage()
    assert record.event == "progress" and set(record.fields) == {"step", *PROGRESS}
