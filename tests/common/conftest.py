"""What the tests of a launcher begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.common.launched import Launch


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """A run in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return Launch(monkeypatch, capsys)
