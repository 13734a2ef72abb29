"""Whole runs of real processes, as a person starts them: in one command, and by hand."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import run as door
from common.journal import read_journal
from common.rundir import RunDir
from tests.oracle.ring import PATIENCE_S, Ring, warm_start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CLEAN = "lost=0 duplicated=0 unexplained=0"
COMMAND = [sys.executable, str(Path(door.__file__))]
LAST_LINE = r"held-out success \d\.\d\d -> \d\.\d\d \(20 maps\) in \d+m\d\ds, run runs/[\w.-]+"
WORK_WITHIN_S = 5.0
"""A late actor has work this long after its hello."""


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.05)


def trees_trained(path: Path) -> int:
    """Trees in the updates that the learner has written down."""
    journal = RunDir(path).learner_journal
    if not journal.is_file():
        return 0
    return sum(len(record.fields["trees"]) for record in read_journal(journal) if record.kind == "consumed")


def actors_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [child for child in launcher.children(recursive=True) if "role=actor" in child.cmdline()]


def audit(path: Path, *words: str) -> str:
    """The last line of `role=audit`, which must find nothing."""
    done = subprocess.run(
        [*COMMAND, "role=audit", f"run={path}", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_one_command_trains_tracks_and_loses_no_tree_when_an_actor_is_killed(tmp_path: Path) -> None:
    words = ["experiment=smoke", "learner.steps=60", "learner.checkpoint_every=20"]
    with (tmp_path / "out").open("w") as out:
        launcher = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT)
        try:
            until(lambda: any((tmp_path / "runs").glob("*/learner")), "the learner")
            (path,) = [each.parent for each in (tmp_path / "runs").glob("*/learner")]
            until(lambda: trees_trained(path) > 8, "some updates")
            (victim, *_) = actors_of(psutil.Process(launcher.pid))
            victim.send_signal(signal.SIGKILL)
            assert launcher.wait(PATIENCE_S) == 0, (tmp_path / "out").read_text()
        finally:
            launcher.kill()
    lines = (tmp_path / "out").read_text().splitlines()
    assert re.fullmatch(LAST_LINE, lines[-1]), lines[-1]
    assert any("killed" in line for line in lines), "the terminal says that an actor was lost"
    assert audit(path).endswith(CLEAN)
    summary = json.loads((path / "summary.json").read_text())
    assert {"sampled", "greedy"} <= set(summary["before"]) and summary["total_s"] > 0
    _check_tracking(path)


def _check_tracking(path: Path) -> None:
    """Parameters, the configuration, and the metrics of every role, on one MLflow run."""
    from mlflow import MlflowClient

    until((path / "tracking" / "mlflow.json").is_file, "the tracker")
    found = json.loads((path / "tracking" / "mlflow.json").read_text())
    client = MlflowClient(found["uri"])
    tracked = client.get_run(found["run_id"])
    roles = {name.partition("/")[0] for name in tracked.data.metrics}
    assert {"allocator", "actor", "learner", "eval"} <= roles
    assert tracked.data.params["learner.steps"] == "60"
    assert "config.yaml" in [each.path for each in client.list_artifacts(found["run_id"])]


def test_an_actor_that_joins_by_hand_from_an_empty_directory_soon_has_work(tmp_path: Path) -> None:
    words = ["experiment=smoke", "learner.steps=120", "learner.checkpoint_every=40"]

    def join_late(ring: Ring) -> None:
        until(lambda: trees_trained(ring.path) > 0, "the first update")
        listens = RunDir(ring.path).endpoint("allocator")
        late = [*ring.words, f"cluster.allocator={listens}", "actor.name=late", "actor.dir=."]
        ring.start("actor-late", *late)
        until((ring.folder / "actor-late" / "journal.tw").is_file, "the late actor")

    model = warm_start(tmp_path / "start", *words)
    with Ring(tmp_path / "ring", [*words, f"model.path={model}"]) as ring:
        ring.train(1, join_late)
        journal = ring.journal()
    hello = _first(journal, "input", lambda fields: fields["message"].get("peer") == "late")
    ours = hello.fields["peer"]
    leases = [each for each in journal if each.kind == "lease_issued" and each.fields["peer"] == ours]
    assert leases, "the late actor got no work at all"
    after = [each for each in journal if each.offset > leases[0].offset and each.kind == "input"]
    assert after[0].fields["now"] - hello.fields["now"] < WORK_WITHIN_S
    dirs = ",".join(str(ring.folder / name) for name in ("actor-0", "actor-late"))
    assert audit(ring.path, f"audit.actor_dirs=[{dirs}]").endswith(CLEAN)


def _first(journal, kind, holds):
    return next(record for record in journal if record.kind == kind and holds(record.fields))
