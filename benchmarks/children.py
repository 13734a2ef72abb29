"""Run one command at a time as a child, say how it is getting on, and leave nothing behind.

consumes: a command.  produces: its output in a file, a line now and then.  waits for: its exit.
unblocked by: that exit, or an interruption, which ends the child (and through it everything it started).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import ROOT, BenchmarkFailed
from common.cli import latest
from common.processes import Lifeline, describe_exit, spawn, stop_all

POLL_S = 0.2
SAY_S = 30.0
"""A line about a child that is still at work comes this often."""
GRACE_S = 20.0
"""A whole run needs some seconds to end its own children."""


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def run_role(name: str, words: Sequence[str], log: Path) -> float:
    """Run `run.py` with these settings, the later ones over the earlier; see `run_command`."""
    return run_command(name, [sys.executable, str(ROOT / "run.py"), *latest(words)], log)


def run_command(name: str, command: Sequence[str], log: Path) -> float:
    """Run a command from the repository's root to its end, its output in `log`; returns its seconds.

    Raises:
        BenchmarkFailed: it exits with another code than 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with Lifeline() as lifeline:
        child = spawn(name, command, log=log, lifeline=lifeline, cwd=ROOT)
        due = child.started + SAY_S
        try:
            while (code := child.exit_code()) is None:
                time.sleep(POLL_S)
                if time.monotonic() >= due:
                    due = time.monotonic() + SAY_S
                    at_work = f"at work for {time.monotonic() - child.started:.0f} s"
                    say(f"    {child.last_lines(1, 150) or at_work}")
        finally:
            stop_all([child], GRACE_S)
    if code:
        last = child.last_lines()
        raise BenchmarkFailed(f"{name} ended with {describe_exit(code)}: {last}; its output: {log}")
    return time.monotonic() - child.started
