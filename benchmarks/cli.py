"""What the command lines of the benchmarks share: overrides of the configuration after `--`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import run
from common import cli
from common.config import Config
from common.errors import ConfigError, StorageError, TreewardError

OURS = ("role", "run", "runs_dir", "seed", "actor.", "eval.", "audit.")
"""Settings that a benchmark sets itself."""


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The benchmark's own options, and the overrides behind `--`.

    Raises:
        ConfigError: an override of a setting that the benchmark sets itself.
    """
    before, _, after = _partition(list(words))
    for word in after:
        if word.startswith("-") or word.startswith(OURS):
            raise ConfigError(f"cannot override {word!r}: the benchmark sets role, run, seed and eval itself")
    return before, after


def _partition(words: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in words:
        return words, False, []
    at = words.index("--")
    return words[:at], True, words[at + 1 :]


def compose(words: Sequence[str]) -> Config:
    """The configuration that these words make, the later over the earlier, checked before anything runs.

    Raises:
        ConfigError: see `run.compose`.
    """
    return run.compose(cli.parse(cli.latest(words), cli.groups(run.CONFIGS)))


def numbers(text: str) -> list[int]:
    """`0,1,2` as whole numbers, for argparse."""
    return [int(part) for part in text.split(",")]


def fresh_run(path: Path) -> Path:
    """A path where a run can be made: an unfinished one of an interrupted benchmark is removed.

    Raises:
        StorageError: something else than a run is there.
    """
    if path.exists():
        if not (path / "run.json").is_file():
            raise StorageError(f"{path} is in the way and is no run directory; remove it or choose --work")
        shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def guarded(main: Callable[[list[str]], int]) -> int:
    """Run `main` on the command line: mistakes and failures are one sentence and an exit code."""
    try:
        return main(sys.argv[1:])
    except TreewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: what had finished is kept where the benchmark says so", file=sys.stderr)
        return 130
