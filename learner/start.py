"""Where a run starts from: the newest checkpoint if there is one, else the warm start's weights.

newest sound checkpoint, or the warm start ─▶ Start(folder, version, trees inside) ─▶ `learner.assembly`
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.audit_books import LearnerBook, read_learner
from common.config import Config, config_hash, to_plain
from common.errors import StorageError
from common.journal import Record, read_journal
from common.logs import fields
from common.nouns import Version
from common.progress import duration
from common.release import commit, packages
from common.resuming import differences, flat, refuse
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from common.tracking import recorded_run
from learner.checkpoint import Checkpoint, newest_checkpoint
from learner.policy import check_model
from learner.state import Origin, RunState, from_ranges, restore_random

LOG = logging.getLogger("treeward.learner")


@dataclass(frozen=True, slots=True)
class Start:
    """The folder that every rank loads (`learner.assembly`), its version, and the trees inside."""

    folder: Path
    tokenizer: WordTokenizer
    version: Version
    trained: frozenset[int] = frozenset()
    resumed: bool = False
    resumed_at: tuple[int, ...] = (0,)
    """Step at which each lineage resumed, the new one's last (`common.staleness.policy_lag`)."""


def start_run(config: Config, rundir: RunDir) -> Start:
    """Find what the run starts from, and check it.

    Raises:
        StorageError: there are no starting weights, no checkpoint can be used, or it is another run's.
    """
    checkpoint = newest_checkpoint(rundir.checkpoints)
    folder = checkpoint.path if checkpoint is not None else starting_weights(config, rundir)
    check_model(folder)
    tokenizer = WordTokenizer.load(folder)
    if checkpoint is None:
        lineage = 1 + max(_starts(_journal(rundir)), default=-1)
        at = (0,) * (lineage + 1)
        return Start(folder, tokenizer, Version(lineage=lineage, step=0), resumed_at=at)
    _refuse_another_run(checkpoint, rundir)
    if checkpoint.state.config_hash != config_hash(config):
        raise StorageError(
            f"the checkpoint {checkpoint.path} was made with other environment or sampling settings; "
            "use the run's own (run=<directory> takes them), or start a new run"
        )
    _refuse_other_settings(checkpoint, config)
    restore_random(checkpoint.state.random)
    return _resumed(checkpoint, rundir, tokenizer)


def starting_weights(config: Config, rundir: RunDir) -> Path:
    """`model.path`, or the run's warm start."""
    return Path(config.model.path) if config.model.path else rundir.warmstart_model


def _resumed(checkpoint: Checkpoint, rundir: RunDir, tokenizer: WordTokenizer) -> Start:
    state, journal = checkpoint.state, _journal(rundir)
    starts = _starts(journal)
    version = Version(lineage=1 + max([state.lineage, *starts]), step=state.step)
    trained = frozenset(from_ranges(state.trained))
    _say_where(checkpoint, version, read_learner(journal))
    at = resumed_at(state, version, starts)
    return Start(checkpoint.path, tokenizer, version, trained, True, at)


def _say_where(checkpoint: Checkpoint, version: Version, before: LearnerBook) -> None:
    """One line for the person. A warning, so that role=local shows it too."""
    state = checkpoint.state
    again, lost = left_behind(before, state.step)
    age = f"{duration(time.time() - state.saved_at)} old" if state.saved_at else "of an earlier release"
    LOG.warning(
        "resumed at step %d as lineage %d from %s (%s), %d trees inside: %d trees to be replayed, %d dropped",
        version.step, version.lineage, checkpoint.path.name, age, sum(1 for _ in from_ranges(state.trained)),
        again, lost, extra=fields("resumed", step=version.step, replayed=again, dropped=lost),
    )  # fmt: skip


def left_behind(before: LearnerBook, step: int) -> tuple[int, int]:
    """What earlier starts had beyond the checkpoint of `step`: (trees that come again, trees that do not).

    The allocator keeps a tree until it hears that a checkpoint has it. Such as were in a checkpoint that is
    gone it has forgotten, and drops them as `checkpoint_lost`.
    """
    beyond = {tree: at for tree, at in before.trained_at.items() if at > step}
    lost = {tree for tree, at in beyond.items() if at <= before.committed_step}
    waiting = before.held - set(before.trained) - set(before.dropped)
    return len((set(beyond) - lost) | waiting), len(lost)


def _refuse_another_run(checkpoint: Checkpoint, rundir: RunDir) -> None:
    """Raise `StorageError` for a checkpoint whose trees this run's allocator knows nothing of."""
    whose, here = checkpoint.state.origin.run, rundir.born
    if whose and here and whose != here:
        raise StorageError(
            f"the checkpoint {checkpoint.path} is of another run ({whose}; this one is {here}): put the "
            f"run's own back, or start a new run from it with model.path={checkpoint.path}"
        )


def _refuse_other_settings(checkpoint: Checkpoint, config: Config) -> None:
    """Raise `ConfigError` for settings that must not change under a run."""
    begun = flat(checkpoint.state.origin.config)
    refuse(f"the checkpoint {checkpoint.path}", differences(begun, config))


def origin_of(config: Config, rundir: RunDir) -> Origin:
    """What makes the checkpoints of this process."""
    return Origin(to_plain(config), dict(packages()), commit(), recorded_run(rundir.tracking), rundir.born)


def _journal(rundir: RunDir) -> list[Record]:
    """What earlier starts wrote down."""
    path = rundir.learner_journal
    return list(read_journal(path)) if path.is_file() else []


def _starts(journal: list[Record]) -> dict[int, int]:
    """The step of every start before, by its lineage. The journal knows of starts that ended before they
    saved anything: two of them under one lineage would make different weights with the same version."""
    return {r.fields["lineage"]: r.fields["step"] for r in journal if r.kind == "start"}


def resumed_at(state: RunState, version: Version, starts: Mapping[int, int]) -> tuple[int, ...]:
    """The step at which each lineage resumed, `[version.lineage + 1]`, the new one's last.

    Args:
        state: of the checkpoint resumed from. One made before this was kept knows nothing, and lineages after
            the one that made it are not in it.
        version: of the new lineage, at the step where it resumes.
        starts: steps of earlier starts, by lineage, for what the checkpoint does not know. A lineage that
            nobody knows counts as begun at 0: of those before it, only the starting weights are not stale.
    """
    known = state.resumed[: state.lineage + 1]
    missing = [starts.get(lineage, 0) for lineage in range(len(known), version.lineage)]
    # Where a checkpoint was put back by hand, a lineage since may have begun before it, without it. None of
    # that lineage's own steps are in these weights.
    beside = [step for lineage, step in starts.items() if state.lineage < lineage < version.lineage]
    return (*known, *missing, min([version.step, *beside]))
