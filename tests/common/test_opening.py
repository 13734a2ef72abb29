"""Which run a role may open, and in which state it must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config, ModelConfig, Role
from common.config_learner import RegularizerConfig
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


def held_near(reference: str, start: str = "", **more: object) -> Config:
    config = Config(model=ModelConfig(path=start), **more)  # type: ignore[arg-type]
    config.learner.regularizer = RegularizerConfig(kl_coefficient=0.1, reference=reference)
    return config


def test_a_reference_that_is_not_there_is_noticed_before_anything_is_made(tmp_path: Path) -> None:
    config = held_near("no/such", runs_dir=str(tmp_path / "runs"))
    with pytest.raises(
        ConfigError, match=r"^learner\.regularizer\.reference must be .* 'no/such': there is no"
    ):
        open_run(config)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", [Role.LOCAL, Role.LEARNER])
@pytest.mark.parametrize("reference, start, key", [("gone", "", "reference"), ("", "gone", r"model\.path")])
def test_a_run_with_a_checkpoint_needs_its_reference_all_the_same(
    run: RunDir, role: Role, reference: str, start: str, key: str
) -> None:
    (run.checkpoints / "step-00000001").mkdir()
    path = str(run.path)
    with pytest.raises(ConfigError, match=rf"{key} must be a folder with a saved model.* got 'gone'"):
        open_run(held_near(reference, start, role=role, run=path, resume=path if role is Role.LOCAL else ""))


def test_nobody_but_the_learner_needs_the_reference(run: RunDir) -> None:
    assert open_run(held_near("gone", role=Role.ALLOCATOR, run=str(run.path))).path == run.path
