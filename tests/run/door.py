"""What stands on both sides of the door: words that are composed, processes, runs that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import run
from common import cli
from common.config import Config
from common.rundir import RunDir

ROOT = Path(run.__file__).resolve().parent


def compose(*words: str) -> Config:
    return run.compose(cli.parse(words, cli.groups(run.CONFIGS)))


def python(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def recorded(path: Path, *words: str) -> str:
    """A run directory with the settings of these words; returns the word that names it."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(run.to_yaml(compose(*words)))
    return f"run={path}"


def resumable(path: Path, *words: str) -> str:
    """The same of a run that was begun."""
    RunDir.create(path.parent, path.name).config_file.write_text(run.to_yaml(compose(*words)))
    return f"resume={path}"


def one_sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """What a mistake was answered with."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error
