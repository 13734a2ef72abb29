"""Where a run starts from: the newest checkpoint if there is one, else the warm start's weights."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.config import Config, config_hash
from common.errors import StorageError
from common.journal import read_journal
from common.nouns import Version
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from learner.checkpoint import Checkpoint, newest_checkpoint, restore
from learner.policy import load_model
from learner.state import RunState, from_ranges, restore_random
from learner.update import make_optimizer

LOG = logging.getLogger("treeward.learner")


@dataclass(frozen=True, slots=True)
class Start:
    """A model and its optimiser at a version, and the trees inside them."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW
    tokenizer: WordTokenizer
    version: Version
    trained: frozenset[int] = frozenset()
    resumed: bool = False
    resumed_at: tuple[int, ...] = (0,)
    """Step at which each lineage resumed, the new one's last (`common.staleness.policy_lag`)."""


def start_run(config: Config, rundir: RunDir) -> Start:
    """Load what the run starts from.

    Raises:
        StorageError: there are no starting weights, or no checkpoint can be used.
    """
    checkpoint = newest_checkpoint(rundir.checkpoints)
    folder = checkpoint.path if checkpoint is not None else starting_weights(config, rundir)
    model = load_model(folder)
    optimizer = make_optimizer(model, config.learner.optimizer)
    tokenizer = WordTokenizer.load(folder)
    if checkpoint is None:
        lineage = 1 + max(_starts(rundir), default=-1)
        at = (0,) * (lineage + 1)
        return Start(model, optimizer, tokenizer, Version(lineage=lineage, step=0), resumed_at=at)
    if checkpoint.state.config_hash != config_hash(config):
        raise StorageError(
            f"the checkpoint {checkpoint.path} was made with other environment or sampling settings; "
            "use the run's own (run=<directory> takes them), or start a new run"
        )
    restore(checkpoint, model, optimizer)
    restore_random(checkpoint.state.random)
    return _resumed(checkpoint, rundir, model, optimizer, tokenizer)


def starting_weights(config: Config, rundir: RunDir) -> Path:
    """`model.path`, or the run's warm start."""
    return Path(config.model.path) if config.model.path else rundir.warmstart_model


def _resumed(
    checkpoint: Checkpoint,
    rundir: RunDir,
    model: PreTrainedModel,
    optimizer: torch.optim.AdamW,
    tokenizer: WordTokenizer,
) -> Start:
    state, starts = checkpoint.state, _starts(rundir)
    version = Version(lineage=1 + max([state.lineage, *starts]), step=state.step)
    trained = frozenset(from_ranges(state.trained))
    LOG.warning("resumed from %s as %s, %d trees inside", checkpoint.path.name, version, len(trained))
    return Start(model, optimizer, tokenizer, version, trained, True, resumed_at(state, version, starts))


def _starts(rundir: RunDir) -> dict[int, int]:
    """The step of every start before, by its lineage. The journal knows of starts that ended before they
    saved anything: two of them under one lineage would make different weights with the same version."""
    if not rundir.learner_journal.is_file():
        return {}
    records = read_journal(rundir.learner_journal)
    return {r.fields["lineage"]: r.fields["step"] for r in records if r.kind == "start"}


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
