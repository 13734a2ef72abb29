"""Where a run starts from: the newest checkpoint if there is one, else the warm start's weights."""

from __future__ import annotations

import logging
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
from learner.state import from_ranges, restore_random
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
        return Start(model, optimizer, tokenizer, Version(lineage=_next_lineage(rundir, -1), step=0))
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
    state = checkpoint.state
    version = Version(lineage=_next_lineage(rundir, state.lineage), step=state.step)
    trained = frozenset(from_ranges(state.trained))
    LOG.warning("resumed from %s as %s, %d trees inside", checkpoint.path.name, version, len(trained))
    return Start(model, optimizer, tokenizer, version, trained, resumed=True)


def _next_lineage(rundir: RunDir, saved: int) -> int:
    """One more than any start before. The journal knows of starts that ended before they saved anything:
    two of them under one lineage would make different weights with the same version."""
    started = [saved]
    if rundir.learner_journal.is_file():
        records = read_journal(rundir.learner_journal)
        started += [record.fields["lineage"] for record in records if record.kind == "start"]
    return 1 + max(started)
