"""When checkpoints are written, what is safe by them, and what becomes of failures."""

import pytest

from common.config_learner import LearnerConfig
from common.errors import StorageError
from common.nouns import Version
from learner import savings as savings_module
from learner.backend.alone import alone
from learner.checkpoint import newest_checkpoint
from learner.policy import build_model, model_files
from learner.savings import MAX_FAILURES, Savings
from learner.state import Origin
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

MODEL = build_model(SMALL_MODEL, TOKENIZER, seed=0)
BACKEND = alone(MODEL, LearnerConfig())


def files() -> dict[str, bytes]:
    return {**model_files(MODEL, TOKENIZER), **BACKEND.state_files()}


def make_savings(folder, **more) -> Savings:
    return Savings(folder, files, every=5, keep=2, config_hash="c", **more)


def test_a_checkpoint_knows_where_every_lineage_resumed(tmp_path):
    savings = make_savings(tmp_path, resumed=(0, 5))
    savings.save(Version(lineage=1, step=6))
    assert newest_checkpoint(tmp_path).state.resumed == [0, 5]


def test_what_makes_a_checkpoint_is_asked_at_each_save(tmp_path):
    runs = iter(["", "mlflow-1"])
    savings = make_savings(tmp_path, origin=lambda: Origin(mlflow_run=next(runs)))
    for step, run in ((5, ""), (10, "mlflow-1")):
        savings.save(Version(lineage=0, step=step))
        assert newest_checkpoint(tmp_path).state.origin.mlflow_run == run


def test_what_a_start_resumed_from_is_not_written_once_more(tmp_path):
    savings = make_savings(tmp_path, trained=[1], saved=Version(lineage=1, step=5))
    assert savings.save(Version(lineage=1, step=5)) == [] and not list(tmp_path.iterdir())
    savings.trained([2])
    assert savings.save(Version(lineage=1, step=6)) == [2]


def test_a_tree_is_reported_safe_by_the_first_checkpoint_that_holds_it_and_only_once(tmp_path):
    savings = make_savings(tmp_path)
    savings.trained([1, 2])
    assert savings.save(Version(lineage=0, step=5)) == [1, 2]
    savings.trained([3])
    assert savings.save(Version(lineage=0, step=6)) == [3]
    assert savings.save(Version(lineage=0, step=6)) == []  # nothing new to write
    assert [savings.is_due(step) for step in (4, 5, 10)] == [False, True, True]


def test_a_failed_save_keeps_the_trees_unsafe_and_training_goes_on_until_the_third_in_a_row(
    tmp_path, monkeypatch
):
    savings = make_savings(tmp_path)
    savings.trained([1])
    real = savings_module.save_checkpoint

    def refuse(*arguments):
        raise StorageError("No space left on device")

    monkeypatch.setattr(savings_module, "save_checkpoint", refuse)
    for step in range(1, MAX_FAILURES):
        assert savings.save(Version(lineage=0, step=step)) is None
    with pytest.raises(StorageError):
        savings.save(Version(lineage=0, step=MAX_FAILURES))
    monkeypatch.setattr(savings_module, "save_checkpoint", real)
    assert savings.save(Version(lineage=0, step=9)) == [1]
    assert savings.failures == 0
