"""When to write a checkpoint, what to tell about it, and how many failures are too many."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.errors import StorageError
from common.logs import fields
from common.nouns import Version
from common.tokenizer import WordTokenizer
from learner.checkpoint import save_checkpoint
from learner.state import RunState, capture_random, to_ranges

LOG = logging.getLogger("treeward.learner.checkpoint")

MAX_FAILURES = 3
"""Failed saves in a row after which the run stops: the disk will not mend itself, and work piles up."""


class Savings:
    """Knows which trees are in the weights and which of them are in a checkpoint.

    Args:
        folder: where checkpoints go.
        every: steps between two of them; the last step is always saved.
        keep: newest ones kept.
        trained: trees in the weights already, from the checkpoint this run resumed from.
        resumed: step at which each lineage up to the current one resumed.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        tokenizer: WordTokenizer,
        *,
        every: int,
        keep: int,
        config_hash: str,
        trained: Iterable[int] = (),
        resumed: Iterable[int] = (0,),
    ) -> None:
        self._folder, self._model, self._optimizer, self._tokenizer = folder, model, optimizer, tokenizer
        self._every, self._keep, self._config_hash = every, keep, config_hash
        self._trained, self._resumed = set(trained), list(resumed)
        self._unsaved: list[int] = []
        self._saved: Version | None = None
        self.failures = 0
        """Saves that failed since the last that did not."""

    def trained(self, trees: Iterable[int]) -> None:
        """These trees are in the weights now."""
        self._unsaved += trees

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def save(self, version: Version) -> list[int] | None:
        """Write a checkpoint of `version`: the trees that are safe by it, or None if the disk refused.

        Raises:
            StorageError: it refused `MAX_FAILURES` times in a row.
        """
        if version == self._saved:
            return []
        state = RunState(
            lineage=version.lineage,
            step=version.step,
            trained=to_ranges({*self._trained, *self._unsaved}),
            config_hash=self._config_hash,
            random=capture_random(),
            resumed=self._resumed,
        )
        try:
            save_checkpoint(self._folder, state, self._model, self._optimizer, self._tokenizer, self._keep)
        except StorageError as error:
            self.failures += 1
            LOG.error("%s", error, extra=fields("checkpoint_failed", failures=self.failures))
            if self.failures >= MAX_FAILURES:
                raise
            return None
        self.failures, self._saved = 0, version
        safe, self._unsaved = self._unsaved, []
        self._trained.update(safe)
        return safe
