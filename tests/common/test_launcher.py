"""role=local with stand-ins for the roles: the order of things, what each child is told, and every way to end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import common.launcher
from common.errors import StorageError
from common.launcher import role_command
from common.rundir import RunDir
from common.supervisor import RoleLost
from tests.common.launched import ROOT, Launch


def left_behind() -> list[psutil.Process]:
    """Processes that a launcher should have ended. Another test of this worker may have begun the resource
    tracker of multiprocessing, which stays."""
    return [c for c in psutil.Process().children() if "resource_tracker" not in " ".join(c.cmdline())]


def test_a_whole_run_ends_with_the_success_before_and_after(launch: Launch) -> None:
    assert launch.run() == 0
    lines, run = launch.lines(), launch.path
    assert re.fullmatch(
        rf"held-out success 0\.41 -> 0\.78 \(200 maps\) in 0m\d\ds, run runs/{run.name}", lines[-1]
    )
    assert lines[-2] == (
        "greedy success 0.55 [0.50, 0.60] -> 0.84 [0.79, 0.89]; "
        "metrics were not recorded (tracking.enabled=false)"
    )
    assert lines[-3] == "audit: trees=1 leases=0 lost=0 duplicated=0 unexplained=0"
    assert re.fullmatch(r"warm start 0m\d\ds, training 0m\d\ds, evaluation 0m\d\ds", lines[-4])
    assert any(re.search(r"step 2/2  success 0\.50  900 tokens/s  lag 0\.5", line) for line in lines), lines
    assert not left_behind()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["after"]["sampled"]["success"] == 0.78 and summary["total_s"] > 0
    assert summary["before"]["checkpoint"] == str(run.absolute() / "warmstart/model")


def test_an_actor_starts_in_an_empty_directory_and_is_told_no_path(launch: Launch) -> None:
    launch.config.cluster.actors = 2
    launch.habits(actors=2)
    assert launch.run() == 0
    for name in ("actor-0", "actor-1"):
        seen = launch.seen_by(name)
        assert seen["found"] == []
        assert f"actor.name={name}" in seen["words"] and "actor.dir=." in seen["words"]
        assert any(word.startswith("cluster.allocator=tcp://127.0.0.1:") for word in seen["words"])
        assert not any(
            word.startswith(("run=", "role=")) or str(Path.cwd()) in word for word in seen["words"]
        )


def test_the_resolved_configuration_is_recorded(launch: Launch) -> None:
    assert launch.run() == 0
    text = (launch.path / "config.yaml").read_text()
    assert "seed: 0\n" in text and f"  batch_trees: {launch.config.learner.batch_trees}\n" in text


def test_an_actor_that_crashes_is_started_again_and_the_run_goes_on(launch: Launch) -> None:
    launch.habits(actor="crash once")
    assert launch.run() == 0
    out = launch.said()
    assert "actor-0 stopped (exit code 1): restart 1 of 5 in 0.05 s; it said: out of luck" in out


def test_a_learner_that_crashes_stops_everything_with_its_sentence_and_code(launch: Launch) -> None:
    launch.habits(learner="crash")
    with pytest.raises(
        RoleLost, match=r"learner stopped \(exit code 4\).*the disk is full.*learner\.out"
    ) as raised:
        launch.run()
    assert raised.value.exit_code == 4
    assert not left_behind()


def test_a_learner_that_is_killed_is_started_again_and_the_run_goes_on(launch: Launch) -> None:
    launch.habits(learner="die once")
    assert launch.run() == 0
    assert "learner stopped (killed by SIGKILL" in launch.said()


def test_a_role_that_does_not_leave_is_ended(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.launcher, "DRAIN_S", 0.3)
    launch.habits(allocator="stay")
    assert launch.run() == 0
    assert "allocator did not leave within 0.3 s: ended" in launch.said()


def test_a_tree_that_was_lost_fails_the_run_and_is_named(launch: Launch) -> None:
    launch.habits(allocator="lose a tree")
    assert launch.run() == 1
    out = launch.said()
    assert "lost: tree=0: opened" in out and out.splitlines()[-1].startswith("held-out success")


def test_success_on_another_split_is_not_called_held_out(launch: Launch) -> None:
    launch.config.eval.split = "train"
    assert launch.run() == 0
    assert launch.lines()[-1].startswith("success on the split train 0.41 -> 0.78 (200")


def test_a_run_with_a_warm_start_is_not_warmed_up_again(launch: Launch) -> None:
    rundir = RunDir.create(Path("runs"), "mine")
    rundir.write_json_atomic(rundir.warmstart_model / "config.json", {})
    launch.config.run = "runs/mine"
    assert launch.run() == 0
    assert not (rundir.path / "logs/warmstart.out").exists()


def test_a_run_that_was_trained_or_is_in_use_is_refused(launch: Launch) -> None:
    assert launch.run() == 0
    launch.config.run = str(launch.path)
    warm = role_command("warmstart", [f"run={launch.config.run}"])
    refused = subprocess.run(warm, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 4 and "has been trained already" in refused.stderr
    with pytest.raises(StorageError, match="has been trained already"):
        launch.run()
    rundir = RunDir.create(Path("runs"), "other")
    launch.config.run = str(rundir.path)
    with rundir.lock("local"), pytest.raises(StorageError, match=f"process {os.getpid()}"):
        launch.run()


def test_children_are_started_from_this_installation() -> None:
    assert role_command("actor", ["seed=1"]) == [sys.executable, str(ROOT / "run.py"), "role=actor", "seed=1"]
