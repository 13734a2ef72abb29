"""Open the run directory that a configuration names, or make it."""

from __future__ import annotations

import os
from pathlib import Path

from common.config import Config, Role
from common.errors import ConfigError
from common.rundir import RunDir, write_bytes_atomic
from common.settings import to_yaml

NAMES_A_NEW_RUN = (Role.LOCAL, Role.WARMSTART)
"""Roles that make a new run directory where none is named."""
MAKES_THE_NAMED = (*NAMES_A_NEW_RUN, Role.ALLOCATOR)
"""Roles that make the named one where there is none; the others work on a run that exists."""


def open_run(config: Config) -> RunDir:
    """The run directory of `config`; a new one gets the configuration written down.

    Raises:
        ConfigError: the role needs a run and none is named.
        StorageError: the directory is no run, or cannot be made.
    """
    path = Path(config.run)
    if not config.run and config.role not in NAMES_A_NEW_RUN:
        role = config.role.value
        raise ConfigError(f"run must be a run directory for role={role}, got ''{_newest(config)}")
    if config.run and (path.exists() or config.role not in MAKES_THE_NAMED):
        return RunDir.open(path)
    rundir = RunDir.create(path.parent, path.name) if config.run else RunDir.create(Path(config.runs_dir))
    record(rundir, config)
    return rundir


def record(rundir: RunDir, config: Config) -> None:
    """Write `config.yaml`, from which `run=` takes its settings."""
    write_bytes_atomic(rundir.config_file, to_yaml(config).encode())


def _newest(config: Config) -> str:
    found = sorted(Path(config.runs_dir).glob("*/run.json"), key=lambda file: file.stat().st_mtime)
    return f"; the newest is run={found[-1].parent}" if found else "; role=local or role=warmstart makes one"


def shown(path: Path) -> str:
    """The path as a person would type it here: relative where it lies below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
