"""The warm start: supervised on action tokens only, deterministic, and whole on disk."""

import dataclasses

import numpy as np
import pytest
import torch

from common.config import Config, TrackingConfig, WarmstartConfig
from common.config_backend import LoraConfig
from common.config_learner import LearnerConfig
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter
from common.metrics import MetricsClient
from common.nouns import Tree
from common.rundir import RunDir
from learner.policy import build_model, load_model
from learner.warmstart import (
    Budget,
    _batches,
    _supervised_loss,
    read_demonstrations,
    run_warmstart_training,
    supervised_rows,
    train_supervised,
)
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, continuation, make_tree, node, turn

CONFIG = Config(
    model=SMALL_MODEL,
    tracking=TrackingConfig(enabled=False),
    warmstart=WarmstartConfig(steps=12, batch=4, lr=0.02),
)


def demonstration(tree_id: int) -> Tree:
    """Answers 6 to a prompt that ends with 3 and 7 to one that ends with 4; no log-probabilities, no versions."""
    answer = 6 + tree_id % 2
    shown = turn((answer, TOKENIZER.end_id), (8,), logprobs=(), versions=())
    more = turn((answer,), (), logprobs=(), versions=())
    return make_tree(
        [node(1, 0, 0, 0, shown), node(2, 1, 0, 1, more, depth=2)],
        [continuation(0, [1, 2], 1.0)],
        tree_id,
        prompt=(9, 3 + tree_id % 2),
    )


DEMONSTRATIONS = [demonstration(number) for number in range(8)]


@pytest.fixture
def rundir(tmp_path) -> RunDir:
    found = RunDir.create(tmp_path, "run")
    TOKENIZER.save(found.warmstart)
    with JournalWriter(found.demonstrations_file) as journal:
        for tree in DEMONSTRATIONS:
            journal.append("tree", tree=tree)
    return found


def weights(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(one, other) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def test_action_tokens_are_targets_and_nothing_else_is():
    (row,) = supervised_rows(DEMONSTRATIONS[0])
    assert row.ids.tolist() == [9, 3, 6, TOKENIZER.end_id, 8, 6]
    assert row.trained.tolist() == [False, False, True, True, False, True]


def test_demonstrations_come_back_as_they_were_written(rundir):
    assert read_demonstrations(rundir.demonstrations_file) == DEMONSTRATIONS


def test_the_loss_is_the_mean_cross_entropy_over_action_tokens_whatever_the_cut():
    model = build_model(SMALL_MODEL, TOKENIZER, seed=1)
    rows = [row for tree in DEMONSTRATIONS for row in supervised_rows(tree)]
    expected = []
    for row in rows:
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.from_numpy(row.ids[None])).logits[0], -1)
        expected += [-float(logprobs[at - 1, row.ids[at]]) for at in np.flatnonzero(row.trained)]
    for tokens in (6, 8192):
        config = dataclasses.replace(
            CONFIG, learner=dataclasses.replace(CONFIG.learner, micro_batch_tokens=tokens)
        )
        assert _supervised_loss(model, rows, range(len(rows)), config) == pytest.approx(
            np.mean(expected), rel=1e-5
        )


def test_training_lowers_the_loss_and_learns_the_demonstrated_answers(rundir):
    rows = [row for tree in DEMONSTRATIONS for row in supervised_rows(tree)]
    model = build_model(SMALL_MODEL, TOKENIZER, seed=1)
    losses = train_supervised(model, rows, CONFIG, Budget(40), MetricsClient("", "warmstart", "t"))
    assert losses[-1] < 0.3 * losses[0]
    logits = model(input_ids=torch.tensor([[9, 3], [9, 4]])).logits[:, -1]
    assert logits.argmax(-1).tolist() == [6, 7]


def test_a_run_saves_a_loadable_model_and_equal_runs_save_equal_ones(rundir):
    assert run_warmstart_training(CONFIG, rundir) == 0
    first = load_model(rundir.warmstart_model)
    assert {path.name for path in rundir.warmstart_model.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert run_warmstart_training(CONFIG, rundir) == 0
    assert same(first, load_model(rundir.warmstart_model))


def test_it_goes_on_from_given_weights_and_saves_elsewhere_within_a_budget(rundir, tmp_path):
    run_warmstart_training(CONFIG, rundir)
    before = load_model(rundir.warmstart_model)
    out = tmp_path / "control"
    run_warmstart_training(CONFIG, rundir, start=rundir.warmstart_model, out=out, budget=Budget(3))
    assert same(before, load_model(rundir.warmstart_model))
    assert not same(before, load_model(out))


def test_no_steps_save_the_fresh_model(rundir):
    config = dataclasses.replace(CONFIG, warmstart=WarmstartConfig(steps=0))
    run_warmstart_training(config, rundir)
    assert load_model(rundir.warmstart_model).config.vocab_size == TOKENIZER.vocab_size


def test_a_budget_ends_by_steps_or_by_seconds():
    assert Budget(5).allows(4, 1e9) and not Budget(5).allows(5, 0)
    assert Budget(5, seconds=2).allows(0, 1.9) and not Budget(5, seconds=2).allows(0, 2)


def test_every_epoch_visits_every_row_once_in_an_order_of_its_own():
    batches = _batches(10, 4, seed=3)
    drawn = [index for _ in range(5) for index in next(batches)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    assert drawn[:10] != drawn[10:]
    assert drawn == [index for _, batch in zip(range(5), _batches(10, 4, seed=3)) for index in batch]  # noqa: B905


def test_missing_demonstrations_name_the_file_and_the_remedy(tmp_path):
    with pytest.raises(StorageError, match=r"demos\.tw: run role=warmstart"):
        read_demonstrations(tmp_path / "demos.tw")


def test_a_journal_without_trees_is_refused(tmp_path):
    with JournalWriter(tmp_path / "demos.tw") as journal:
        journal.append("other", value=1)
    with pytest.raises(StorageError, match="holds no demonstrations"):
        read_demonstrations(tmp_path / "demos.tw")


def test_a_record_that_is_no_tree_is_refused(tmp_path):
    with JournalWriter(tmp_path / "demos.tw") as journal:
        journal.append("tree", tree={"id": 1})
    with pytest.raises(StorageError, match="not a tree"):
        read_demonstrations(tmp_path / "demos.tw")


def test_adapters_for_layers_that_are_not_there_are_refused_before_the_model_is_trained(rundir):
    config = dataclasses.replace(CONFIG, learner=LearnerConfig(lora=LoraConfig(rank=2, targets=["nosuch"])))
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets must name linear layers .* got nosuch"):
        run_warmstart_training(config, rundir)
    assert not (rundir.warmstart_model / "config.json").exists()
    config.learner.lora = LoraConfig(rank=0, targets=["nosuch"])
    assert run_warmstart_training(config, rundir) == 0
