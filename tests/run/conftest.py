"""Every test of the door stands in an empty directory."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest

import run
from common.config import Config

COMPOSE_GROUPS = run._compose_groups


@pytest.fixture(autouse=True)
def composed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal choices compose to equal configurations: Hydra's work is done once for each."""
    monkeypatch.setattr(
        run, "_compose_groups", lambda choices: copy.deepcopy(composed(run.CONFIGS, *choices.items()))
    )


@functools.cache
def composed(configs: Path, *choices: tuple[str, str]) -> Config:
    return COMPOSE_GROUPS(dict(choices))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty directory, so that one sees what is left there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Configurations that got as far as starting a role; none is started."""
    seen: list[object] = []
    monkeypatch.setattr(run, "start", lambda config: seen.append(config) or 0)
    return seen
