"""When to write a checkpoint, what to tell about it, and how many failures are too many."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from common.errors import StorageError
from common.logs import fields
from common.nouns import Version
from learner.checkpoint import save_checkpoint
from learner.state import Origin, RunState, capture_random, to_ranges

LOG = logging.getLogger("treeward.learner.checkpoint")

MAX_FAILURES = 3
"""Failed saves in a row after which the run stops: the disk will not mend itself, and work piles up."""


class Savings:
    """Knows which trees are in the weights and which of them are in a checkpoint.

    Args:
        folder: where checkpoints go.
        files: makes the files of the current weights and of every rank's optimiser (`learner.checkpoint`).
        every: steps between two of them; the last step is always saved.
        keep: newest ones kept.
        config_hash: of the settings that all roles share.
        origin: what makes them, asked at each save.
        trained: trees in the weights already, from the checkpoint this run resumed from.
        resumed: step at which each lineage up to the current one resumed.
        saved: version that the newest checkpoint holds, if this start resumed from it.
    """

    def __init__(
        self,
        folder: Path,
        files: Callable[[], Mapping[str, bytes]],
        *,
        every: int,
        keep: int,
        config_hash: str,
        origin: Callable[[], Origin] = Origin,
        trained: Iterable[int] = (),
        resumed: Iterable[int] = (0,),
        saved: Version | None = None,
    ) -> None:
        self._folder, self._files, self._origin = folder, files, origin
        self._every, self._keep, self._config_hash = every, keep, config_hash
        self._trained, self._resumed = set(trained), list(resumed)
        self._unsaved: list[int] = []
        self._saved = saved
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
            saved_at=time.time(),
            origin=self._origin(),
        )
        try:
            save_checkpoint(self._folder, state, self._files(), self._keep)
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
