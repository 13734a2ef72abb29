"""role=local whose roles are stand-ins: how they behave, what is said, and what a run leaves."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import common.launcher
import common.supervisor
from common.config import Config
from common.launcher import run_local

FAKE = Path(__file__).with_name("fake_role.py")
ROOT = Path(__file__).resolve().parents[2]


def fake_command(role: str, words: Sequence[str]) -> list[str]:
    return [sys.executable, str(FAKE), role, *words]


class Launch:
    """One actor, two updates and short waits, in the directory that the test stands in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(common.supervisor, "BACKOFF_S", 0.05)
        monkeypatch.setattr(common.supervisor, "TICK_S", 0.02)
        monkeypatch.setattr(common.launcher, "PROGRESS_S", 0.2)
        self.config = Config()
        self.config.tracking.enabled = False
        self.config.cluster.actors = 1
        self.config.learner.steps = 2
        self.habits()

    def habits(self, **habits: Any) -> None:
        """How the stand-ins behave from now on."""
        self._monkeypatch.setenv("TREEWARD_FAKE", json.dumps(habits))

    def run(self) -> int:
        return run_local(self.config, fake_command)

    def said(self) -> str:
        """What was printed since this was last asked."""
        return self._capsys.readouterr().out

    def lines(self) -> list[str]:
        return self.said().splitlines()

    @property
    def path(self) -> Path:
        """The only run there is."""
        [run] = Path("runs").iterdir()
        return run

    def seen_by(self, actor: str) -> dict[str, list[str]]:
        """What an actor was told and what it found in its directory."""
        seen: dict[str, list[str]] = json.loads((self.path / "actors" / actor / "seen.json").read_text())
        return seen
