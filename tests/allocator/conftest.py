"""What the tests of a core that dies begin with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.allocator.mortal import Mortal, worked


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine dies here: what was written stays, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def mortal(no_waiting_for_the_disk: None, tmp_path: Path) -> Mortal:
    """One that has done a little of a run."""
    return worked(tmp_path)
