"""Open the run directory that a configuration names, or make it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.config import Config, Role
from common.errors import ConfigError, StorageError
from common.journal import read_journal
from common.manifest import damage, last_step, newest_first
from common.rundir import RunDir, write_bytes_atomic
from common.settings import to_yaml

NAMES_A_NEW_RUN = (Role.LOCAL, Role.WARMSTART)
"""Roles that make a new run directory where none is named."""
MAKES_THE_NAMED = (*NAMES_A_NEW_RUN, Role.ALLOCATOR)
"""Roles that make the named one where there is none; the others work on a run that exists."""
FOLLOW_S = 15.0
"""How long processes of a launcher that has died are waited for: they promise to leave within 10 s."""
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
"""What a folder with a model holds, whoever wrote it."""


def open_run(config: Config) -> RunDir:
    """The run directory of `config`; a new one gets the configuration written down.

    Raises:
        ConfigError: the role needs a run and none is named, or `model.path` or the reference holds no model.
        StorageError: the directory is no run, or cannot be made.
    """
    path = Path(config.run)
    if config.role in (Role.LOCAL, Role.LEARNER):
        check_reference(config)
    if config.role is Role.LOCAL and not (config.resume and has_checkpoint(path)):
        check_model_path(config)
    if not config.run and config.role not in NAMES_A_NEW_RUN:
        role = config.role.value
        raise ConfigError(f"run must be a run directory for role={role}, got ''{_newest(config)}")
    if config.run and (path.exists() or config.role not in MAKES_THE_NAMED):
        rundir = RunDir.open(path)
        if config.role is Role.LEARNER and not has_checkpoint(path):
            check_model_path(config)
        return rundir
    rundir = RunDir.create(path.parent, path.name) if config.run else RunDir.create(Path(config.runs_dir))
    record(rundir, config)
    return rundir


def has_checkpoint(run: Path) -> bool:
    """Whether the learner of a run ever saved: its starting weights do not matter any more."""
    return any((run / "learner" / "checkpoints").glob("[!.]*"))


def check_model_path(config: Config) -> None:
    """Raise `ConfigError` if `model.path` names anything but a folder with the files of a model."""
    _check_model("model.path", config.model.path, "")


def check_reference(config: Config) -> None:
    """Raise `ConfigError` if a run is to be held near to a model that is not there.

    Without one named, that is `model.path`, for the whole life of a run; the warm start is not there yet.
    """
    regularizer = config.learner.regularizer
    if regularizer.kl_coefficient > 0 and regularizer.reference:
        _check_model("learner.regularizer.reference", regularizer.reference, "")
    elif regularizer.kl_coefficient > 0:
        _check_model("model.path", config.model.path, " (learner.regularizer.reference is empty)")


def _check_model(key: str, value: str, why: str) -> None:
    folder = Path(value)
    missing = lacks(folder) if value else []
    if missing:
        what = f"it lacks {', '.join(missing)}" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{key} must be a folder with a saved model{why}, got {value!r}: {what}")


def lacks(folder: Path) -> list[str]:
    """The files of a model that are not in `folder`."""
    return [name for name in MODEL_FILES if not (folder / name).is_file()]


def trained(rundir: RunDir) -> bool:
    """Whether an allocator has begun to grow trees there: its starting weights are given."""
    path = rundir.allocator_journal
    return path.is_file() and any(record.kind == "tree_opened" for record in read_journal(path))


def refuse_trained(rundir: RunDir) -> None:
    """Raise `StorageError` where a run has been trained, or is being trained now."""
    if trained(rundir):
        raise already_trained(rundir.path)


def already_trained(path: Path) -> StorageError:
    """To be raised where the run at `path` is asked for once more."""
    run = shown(path)
    return StorageError(
        f"{run} has been trained already: resume={run} goes on where it was interrupted, or with more "
        "learner.steps; a new run can start from one of its checkpoints, as model.path="
    )


def is_complete(rundir: RunDir, steps: int) -> bool:
    """Whether a run has been trained for so many updates, and evaluated after that."""
    try:
        summary = json.loads((rundir.path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return int(summary.get("steps", steps)) >= steps and (last_step(rundir.checkpoints) or 0) >= steps


def step_to_go_on_from(rundir: RunDir) -> int:
    """The update inside a run's newest sound checkpoint; 0 where it has none yet.

    Raises:
        StorageError: it has checkpoints and can go on from none of them. The learner would say so once all
            others have been started, and would not begin afresh either.
    """
    step = last_step(rundir.checkpoints)
    if step is not None or not has_checkpoint(rundir.path):
        return step or 0
    newest = next(iter(newest_first(rundir.checkpoints)), None)
    what = f"{shown(rundir.checkpoints)} holds none but such as were set aside (corrupt-…)"
    if newest is not None:
        what = f"the newest: {shown(newest)}/{damage(newest, hashed=True)}"
    raise StorageError(
        f"no checkpoint of {shown(rundir.path)} is sound, {what}; put one back from a copy, or "
        "start a new run"
    )


def wait_until_free(rundir: RunDir) -> None:
    """The roles of a launcher that was killed may take a moment to follow it.

    Raises:
        StorageError: one of them works on.
    """
    deadline = time.monotonic() + FOLLOW_S
    waiting = [Role.ALLOCATOR, Role.LEARNER, Role.TRACKER]
    while waiting:
        try:
            rundir.lock(waiting[0].value).release()
            del waiting[0]
        except StorageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def before_training(rundir: RunDir) -> Iterator[None]:
    """Hold the run for whoever writes its starting weights: nobody has trained it, and nobody begins to.

    Raises:
        StorageError: it has been trained, or another process works on it; nothing was touched.
    """
    refuse_trained(rundir)
    with ExitStack() as stack:
        for role in (Role.WARMSTART, Role.ALLOCATOR, Role.LEARNER):
            stack.enter_context(rundir.lock(role.value))
        refuse_trained(rundir)  # by one that ended since
        yield


def record(rundir: RunDir, config: Config) -> None:
    """Write `config.yaml`, from which `run=` takes its settings."""
    write_bytes_atomic(rundir.config_file, to_yaml(config).encode())


def _newest(config: Config) -> str:
    found = sorted(Path(config.runs_dir).glob("*/run.json"), key=lambda file: file.stat().st_mtime)
    return f"; the newest is run={found[-1].parent}" if found else "; role=local or role=warmstart makes one"


def shown(path: Path) -> str:
    """The path as a person would type it here: relative where it lies below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
