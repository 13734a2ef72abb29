"""What every benchmark has in common: one results file, one headline, and a record of where it was measured.

begin(name) ─▶ … measure … ─▶ finish(headline, runs) ─▶ results/<name>.json ─▶ docs/benchmarks.md
                                                   └─▶ `name: key=value key=value`, the last line printed
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from common.errors import StorageError, TreewardError
from common.rundir import write_json_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MEASURED = ("benchmarks/results", "docs/benchmarks.md")
"""What measuring itself changes: it makes no tree dirty."""


class BenchmarkFailed(TreewardError):
    """A measurement could not be made; the message says which process failed and where its output is."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Session:
    """One benchmark from its first second on."""

    name: str
    """In the headline."""
    file: str
    """Name of the results file; differs from `name` for the quick tier."""
    command: str
    date: str
    began: float
    """Monotonic seconds."""
    load: tuple[float, float, float]
    """Load averages over 1, 5 and 15 minutes at the start."""
    git: dict[str, Any]


def begin(name: str, words: Sequence[str], *, module: str = "", quick: bool = False) -> Session:
    """Note the machine's state before anything runs. `words` are the command line's."""
    return Session(
        name=name,
        file=f"{name}-quick" if quick else name,
        command=shlex.join(["python", "-m", f"benchmarks.{module or name}", *words]),
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        began=time.monotonic(),
        load=os.getloadavg(),
        git=git_state(),
    )


def finish(
    session: Session, headline: Mapping[str, float], runs: Sequence[Any], folder: Path = RESULTS, **more: Any
) -> str:
    """Write `<folder>/<file>.json` and return the last line to print.

    Args:
        headline: the few figures to remember.
        runs: raw values, one entry for each run or seed.
        more: further fields, JSON-ready.

    Raises:
        StorageError: the disk refuses.
    """
    line = headline_line(session.name, headline)
    content = {
        "name": session.name,
        "headline": dict(headline),
        "last_line": line,
        "command": session.command,
        "date": session.date,
        "seconds": round(time.monotonic() - session.began, 1),
        "git": session.git,
        "machine": machine(),
        "load_average": {"start": list(session.load), "end": list(os.getloadavg())},
        "runs": list(runs),
        **more,
    }
    write_json_atomic(folder / f"{session.file}.json", content)
    return line


def read_results(file: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    """The content of a results file; None where nothing was measured yet.

    Raises:
        StorageError: it is there and cannot be read.
    """
    path = folder / f"{file}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot read the results {path}: {error}; measure again") from error
    if not isinstance(found, dict):
        raise StorageError(f"{path} must hold a JSON object; measure again")
    return found


def headline_line(name: str, values: Mapping[str, float]) -> str:
    """`ring: rollout_tokens_per_s=3120 actor_wait=0.104`."""
    return f"{name}: " + " ".join(f"{key}={shown(value)}" for key, value in values.items())


def shown(value: float) -> str:
    """Whole numbers, and numbers from 100 up, without decimals; smaller ones with three."""
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3f}"


# ----------------------------------------------------------------------------------------------- where


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def git_state(root: Path = ROOT) -> dict[str, Any]:
    """`commit`, and whether the tree differs from it (results and their tables aside)."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    changed = _git(root, "status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in MEASURED))
    return {"commit": commit or "none", "dirty": bool(changed) or not commit}


def _git(root: Path, *words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=root, capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
