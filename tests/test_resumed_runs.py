"""Whole runs that `resume=` takes up: every process was killed with -9 at once, or a checkpoint is damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
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
from common.journal import read_journal
from common.manifest import last_step, step_name
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


# ------------------------------------------------------------------------- damaged after everything had ended


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four updates, evaluated, with checkpoints of the second and the fourth."""
    folder = tmp_path_factory.mktemp("complete")
    words = ["experiment=smoke", "tracking=none", "cluster.actors=1", "run=runs/x"]
    finish(folder, *words, "learner.steps=4", "learner.checkpoint_every=2")
    return folder


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 10)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage, name", [(cut, "model.safetensors"), (flip, "optimizer.safetensors")])
def test_a_complete_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(
    tmp_path: Path, complete: Path, damage: Callable[[Path], None], name: str
) -> None:
    """The learner went back, and the allocator would not; a flipped byte was not even looked for."""
    shutil.copytree(complete / "runs", tmp_path / "runs")
    rundir = RunDir(tmp_path / "runs" / "x")
    damage(rundir.checkpoints / step_name(4) / name)
    lines = finish(tmp_path, "resume=runs/x")
    assert lines[0] == "resuming runs/x at step 2/4"
    said = "\n".join(lines)
    assert f"step-00000004/{name} " in said and "set aside as corrupt-step-00000004-" in said
    assert "newest sound checkpoint is of update 2 of 4" in said
    assert "resumed at step 2 as lineage 1" in said and "0 trees to be replayed, 8 dropped" in said
    assert starts(rundir) == [(0, 0), (1, 2)] and last_step(rundir.checkpoints) == 4
    report = audit_run(rundir)
    assert report.ok and report.trees == 24, [*report.lines()]
    assert finish(tmp_path, "role=replay", "run=runs/x")[-1].endswith(" differences=0")
    (again,) = finish(tmp_path, "resume=runs/x")
    assert again.startswith("runs/x is complete, its 4 updates are trained")


def test_a_run_without_any_sound_checkpoint_names_the_file_and_starts_nothing(
    tmp_path: Path, complete: Path
) -> None:
    shutil.copytree(complete / "runs", tmp_path / "runs")
    rundir = RunDir(tmp_path / "runs" / "x")
    for step in (2, 4):
        cut(rundir.checkpoints / step_name(step) / "model.safetensors")
    journal = rundir.allocator_journal.read_bytes()
    done = subprocess.run(
        [*COMMAND, "resume=runs/x"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error: no checkpoint of runs/x is sound, the newest: ")
    assert "/step-00000004/model.safetensors has " in done.stderr and done.stderr.count("\n") == 1
    assert rundir.allocator_journal.read_bytes() == journal
