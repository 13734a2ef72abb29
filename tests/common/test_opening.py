"""Which run a role may open, and in which state it must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config, ModelConfig, Role
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter
from common.opening import MODEL_FILES, before_training, open_run, refuse_trained
from common.rundir import RunDir


@pytest.fixture(name="run")
def new_run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "r")


def grow_a_tree(run: RunDir) -> None:
    with JournalWriter(run.allocator_journal) as journal:
        journal.append("start", run="r")
        journal.append("tree_opened", tree=0, task="t", wave=0)


def test_a_run_is_trained_once_its_first_tree_was_opened(run: RunDir) -> None:
    refuse_trained(run)
    with JournalWriter(run.allocator_journal) as journal:
        journal.append("start", run="r")
    refuse_trained(run)
    grow_a_tree(run)
    with pytest.raises(StorageError, match=r"r has been trained already: resume="):
        refuse_trained(run)


@pytest.mark.parametrize("role", ["allocator", "learner", "warmstart"])
def test_starting_weights_are_not_written_while_the_run_is_in_use(run: RunDir, role: str) -> None:
    held = pytest.raises(StorageError, match=rf"{role}\.lock is held by process")
    with run.lock(role), held, before_training(run):
        pytest.fail("got in")
    with before_training(run):
        pass


@pytest.mark.parametrize("role", ["allocator", "learner", "warmstart"])
def test_nobody_begins_to_train_while_starting_weights_are_written(run: RunDir, role: str) -> None:
    with before_training(run), pytest.raises(StorageError, match="is held by process"):
        run.lock(role)
    run.lock(role).release()


def test_a_launcher_that_holds_the_run_does_not_lock_out_its_own_warm_start(run: RunDir) -> None:
    with run.lock("local"), before_training(run):
        pass


def test_a_learner_needs_its_starting_model_only_until_there_is_a_checkpoint(run: RunDir) -> None:
    config = Config(role=Role.LEARNER, run=str(run.path), model=ModelConfig(path="no/such"))
    with pytest.raises(ConfigError, match=r"model\.path .*'no/such': there is no such folder"):
        open_run(config)
    (run.checkpoints / "step-00000001").mkdir()
    assert open_run(config).path == run.path


def test_a_complete_model_is_taken(tmp_path: Path) -> None:
    for name in MODEL_FILES:
        (tmp_path / name).write_text("")
    made = open_run(Config(run=str(tmp_path / "new"), model=ModelConfig(path=str(tmp_path))))
    assert made.config_file.is_file()
