"""Whole runs of real processes whose allocator is killed with -9, again and again, at random moments."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import run as door
from common.audit import audit_run
from common.audit_books import read_books
from common.journal import read_journal
from common.rundir import RunDir
from tests.oracle.ring import PATIENCE_S, Ring
from tests.oracle.test_ring_equals_oracle import RANDOM, assert_equal, settings, start

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

COMMAND = [sys.executable, str(Path(door.__file__))]
KILLS = 4


def until(condition: Callable[[], bool], what: str, launcher: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        assert launcher.poll() is None, f"the run has ended while the test waits for {what}"
        time.sleep(0.05)


def allocator_of(launcher: psutil.Process) -> psutil.Process | None:
    children = launcher.children(recursive=True)
    return next((child for child in children if "role=allocator" in child.cmdline()), None)


def updates(rundir: RunDir) -> int:
    if not rundir.learner_journal.is_file():
        return 0
    return sum(record.kind == "consumed" for record in read_journal(rundir.learner_journal))


def starts(rundir: RunDir) -> int:
    return sum(record.kind == "start" for record in read_journal(rundir.allocator_journal))


def test_a_local_run_survives_its_allocator_being_killed_again_and_again(tmp_path: Path) -> None:
    """Exit 0, every update made, nothing lost, nothing twice; and each time the books are back at once."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    words = ["experiment=smoke", "learner.steps=150", "learner.checkpoint_every=20", "tracking=none"]
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: any((tmp_path / "runs").glob("*/learner")), "the learner", launcher)
            (path,) = [each.parent for each in (tmp_path / "runs").glob("*/learner")]
            rundir = RunDir(path)
            until(lambda: updates(rundir) > 3, "some updates", launcher)
            for kill in range(1, KILLS + 1):
                time.sleep(draw.uniform(0.0, 2.0))
                victim = allocator_of(psutil.Process(launcher.pid))
                assert victim is not None
                victim.send_signal(signal.SIGKILL)
                until(lambda n=kill: starts(rundir) > n, "the next allocator", launcher)  # type: ignore[misc]
                done = updates(rundir)
                if kill % 2:  # every other time it is killed before anything is trained again
                    until(lambda n=done: updates(rundir) > n, "another update", launcher)  # type: ignore[misc]
            assert launcher.wait(PATIENCE_S) == 0, (tmp_path / "out").read_text()
        finally:
            launcher.kill()
            launcher.wait()
    said = (tmp_path / "out").read_text()
    assert said.count("allocator stopped (killed") == KILLS, said
    report = audit_run(rundir)
    assert report.ok, [*report.lines()]
    assert updates(rundir) == 150
    books = read_books(rundir.allocator_journal, [], rundir.learner_journal)
    assert len(books.allocator.committed) == 150 * 4 and len(books.allocator.recoveries) == KILLS
    assert max(books.allocator.recoveries) < 20, "it is under 2 s; this machine may be busy"


def test_a_deterministic_run_whose_allocator_was_killed_makes_the_same_weights(
    start: Path,
    tmp_path: Path,
) -> None:
    """Bit for bit what the plain loop computes: the restart left no trace in trees, decisions or weights."""

    def kill_it(ring: Ring) -> None:
        rundir = RunDir(ring.path)
        for number in range(1, 3):
            ring.wait(lambda n=number: updates(rundir) >= n)  # type: ignore[misc]
            ring.kill("allocator" if number == 1 else f"allocator-{number - 1}")
            ring.start(f"allocator-{number}", f"run={ring.path}", "cluster.allocator=tcp://127.0.0.1:0")

    words = settings(start, *RANDOM, "learner/credit=granted", "learner/weight=none")
    with Ring(tmp_path, words) as ring:
        ring.train(2, kill_it)
        assert_equal(ring, start, tmp_path / "oracle")
        report = audit_run(RunDir(ring.path), [ring.folder / name for name in ("actor-0", "actor-1")])
    assert report.ok, [*report.lines()]
    assert starts(RunDir(ring.path)) == 3
