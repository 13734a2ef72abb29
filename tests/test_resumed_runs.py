"""Whole runs of which every process is killed with -9 at once, and which `resume=` takes up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import run as door
from common.audit import audit_run
from common.journal import read_journal
from common.manifest import last_step
from common.rundir import RunDir
from tests.oracle.ring import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

COMMAND = [sys.executable, str(Path(door.__file__))]
STEPS, MORE = 20, 24


def kill_everything(launcher: subprocess.Popen[bytes]) -> int:
    """Launcher, tracker, allocator, learner, actors, evaluations; how many died."""
    victims = [psutil.Process(launcher.pid)]
    victims += victims[0].children(recursive=True)
    for victim in victims:
        victim.send_signal(signal.SIGKILL)
    launcher.wait()
    psutil.wait_procs(victims, timeout=10)
    return len(victims)


def run_and_kill(folder: Path, words: list[str], rundir: RunDir, steps: int, draw: random.Random) -> int:
    """Start, kill once a checkpoint of so many steps is there, a little later; where the run was then."""
    with (folder / "out").open("ab") as out:
        launcher = subprocess.Popen([*COMMAND, *words], cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + PATIENCE_S
        while (last_step(rundir.path / "learner" / "checkpoints") or 0) < steps:
            assert launcher.poll() is None and time.monotonic() < deadline, (folder / "out").read_text()
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 0.5))
        assert kill_everything(launcher) >= 5
    return last_step(rundir.checkpoints) or 0


def finish(folder: Path, *words: str) -> list[str]:
    """Resume to the end; what was printed."""
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def starts(rundir: RunDir) -> list[tuple[int, int]]:
    """(lineage, step) of each start of the learner."""
    records = [r.fields for r in read_journal(rundir.learner_journal) if r.kind == "start"]
    return [(fields["lineage"], fields["step"]) for fields in records]


def test_a_run_whose_every_process_was_killed_goes_on_to_its_end_and_beyond(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    draw, rundir = random.Random(seed), RunDir(tmp_path / "runs" / "x")
    begin = ["experiment=smoke", f"learner.steps={STEPS}", "learner.checkpoint_every=3", "run=runs/x"]
    at = [0, run_and_kill(tmp_path, [*begin, "cluster.actors=2"], rundir, 3, draw)]
    tracked = json.loads((rundir.tracking / "mlflow.json").read_text())
    at.append(run_and_kill(tmp_path, ["resume=runs/x", "cluster.actors=1"], rundir, at[-1] + 3, draw))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    lines = finish(elsewhere, f"resume={rundir.path}")
    assert lines[0].endswith(f"at step {at[-1]}/{STEPS}")
    (where,) = [line for line in lines if line.startswith("learner: resumed at step")]
    assert f"resumed at step {at[-1]} as lineage 2 from step-" in where and "trees to be replayed" in where
    assert starts(rundir) == list(enumerate(at)), (
        "each start goes on from the newest checkpoint, as a new lineage"
    )
    assert last_step(rundir.checkpoints) == STEPS
    (again,) = finish(tmp_path, "resume=runs/x")
    assert again.startswith(f"runs/x is complete, its {STEPS} updates are trained")
    finish(tmp_path, "resume=runs/x", f"learner.steps={MORE}")
    assert (last_step(rundir.checkpoints), starts(rundir)[-1]) == (MORE, (3, STEPS))
    report = audit_run(rundir)
    assert report.ok, [*report.lines()]
    assert finish(tmp_path, "role=replay", "run=runs/x")[-1].endswith(" differences=0")
    assert not (elsewhere / "runs").exists()
    check_tracking(rundir, tracked)


def check_tracking(rundir: RunDir, tracked: dict[str, str]) -> None:
    """One MLflow run, the one that the first process made, holds every step."""
    from mlflow import MlflowClient

    assert json.loads((rundir.tracking / "mlflow.json").read_text()) == tracked
    client = MlflowClient(tracked["uri"])
    (experiment,) = [each for each in client.search_experiments() if each.name == "treeward"]
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_id, found.info.status) == (tracked["run_id"], "FINISHED")
    steps = {metric.step for metric in client.get_metric_history(tracked["run_id"], "learner/loss")}
    # What the tracker had read and not handed on when it was killed is gone with it: the last second.
    assert steps <= set(range(1, MORE + 1)) and set(range(STEPS + 1, MORE + 1)) <= steps
    assert min(steps) <= 3 + 1, "the first process's numbers are there too"
    assert os.path.isfile(rundir.path / "summary.json")
