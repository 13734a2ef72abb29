"""What a long benchmark has finished, kept in its working directory, so that it goes on where it stopped.

    partial.json = {settings, finished: {"<seed>/<arm>": [entry …]}}     removed once the results are written

Entries count only for the settings they were made under: with others, the benchmark begins anew. The commit
is one of them wherever an entry does not carry its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import StorageError
from common.rundir import write_json_atomic

Entries = list[dict[str, Any]]


class Partial:
    """See the module docstring. Every `keep` is on disk when it returns."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Take up what is at `path`, if it was made under `settings`.

        Raises:
            StorageError: the file cannot be read.
        """
        self._path, self._settings = path, dict(settings)
        self.finished: dict[str, Entries] = {}
        self.discarded = 0
        """Entries found that were made under other settings."""
        found = _read(path)
        if found.get("settings") == self._settings:
            self.finished = found["finished"]
        else:
            self.discarded = len(found.get("finished", ()))

    @classmethod
    def take_up(
        cls, work: Path, settings: Mapping[str, Any], fresh: bool, say: Callable[[str], None]
    ) -> Partial:
        """What is kept in the working directory; nothing of it where the benchmark is to start `fresh`.

        Raises:
            StorageError: the file cannot be read.
        """
        path = work / "partial.json"
        if fresh:
            path.unlink(missing_ok=True)
        partial = cls(path, settings)
        if partial.discarded:
            say(f"{partial.discarded} finished arms were made under other settings and do not count")
        return partial

    def missing(
        self, todo: Sequence[tuple[int, str]], say: Callable[[str], None]
    ) -> Iterator[tuple[int, str]]:
        """Those of the (seed, arm) to do that have not finished, each announced when its turn comes."""
        for number, (seed, arm) in enumerate(todo, start=1):
            finished = self.get(seed, arm) is not None
            say(f"[{number}/{len(todo)}] seed {seed}, {arm}{': finished before' if finished else ''}")
            if not finished:
                yield seed, arm

    def get(self, seed: int, arm: str) -> Entries | None:
        """The entries of an arm; None where it has not finished."""
        return self.finished.get(f"{seed}/{arm}")

    def keep(self, seed: int, arm: str, entries: Entries) -> None:
        """An arm has finished."""
        self.finished[f"{seed}/{arm}"] = entries
        write_json_atomic(self._path, {"settings": self._settings, "finished": self.finished})

    def remove(self) -> None:
        """Nothing is to be taken up any more."""
        self.finished.clear()
        self._path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read {path}: {error}; remove it to start from the beginning") from error
    return found if isinstance(found, dict) else {}
