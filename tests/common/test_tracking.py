"""MLflow for real: the tracker's process, a SQLite store, servers that are down or never answer.

The store is read with sqlite3, so that this process does not spend seconds on importing mlflow.
"""

from __future__ import annotations

import json
import posixpath
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import ClusterConfig, Config, ModelConfig, TrackingConfig
from common.metrics import MetricsClient
from common.rundir import RunDir
from common.tracking import MAX_PARAM, clean_name, clean_params, flat_params

PROGRAM = """
import sys, pathlib
from common.config import ClusterConfig, Config, ModelConfig, TrackingConfig
from common.rundir import RunDir
from common.tracker import run_tracker

rundir = RunDir.open(pathlib.Path(sys.argv[1]))
config = Config(
    runs_dir=str(rundir.path.parent),
    model=ModelConfig(path="p" * 5000),
    cluster=ClusterConfig(tracker="tcp://127.0.0.1:0"),
    tracking=TrackingConfig(uri=sys.argv[2], experiment="odd /name"),
)
sys.exit(run_tracker(config, rundir))
"""


class TrackerProcess:
    """`run_tracker` in a process of its own, as a launcher starts it."""

    def __init__(self, rundir: RunDir, uri: str = "") -> None:
        command = [sys.executable, "-c", PROGRAM, str(rundir.path), uri]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._rundir = rundir
        self.endpoint = rundir.wait_endpoint("tracker", 20)

    def client(self, role: str, peer: str = "") -> MetricsClient:
        return MetricsClient(self.endpoint, role, peer or role)

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 90
        while text not in self._rundir.log_file("tracker").read_text():
            assert time.monotonic() < deadline, f"the tracker never said {text!r}"
            time.sleep(0.05)

    def stop(self) -> str:
        """SIGTERM, exit 0 in time; returns what it printed."""
        self._process.send_signal(signal.SIGTERM)
        _, printed = self._process.communicate(timeout=40)
        assert self._process.returncode == 0, printed
        return printed

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def query(runs: Path, statement: str) -> list[Any]:
    with sqlite3.connect(runs / "mlflow.db") as store:
        return store.execute(statement).fetchall()


ODD_NAMES = ("a//b", "/lead", "tail/", "../up", "top@1%", "ünïcode", "x" * 128, "sp ace", "a/./b", "..", " ")


@pytest.fixture(name="recorded", scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, str]:
    """One run with two roles, odd names and a NaN; with what the tracker printed."""
    rundir = RunDir.create(tmp_path_factory.mktemp("runs"), "one")
    rundir.config_file.write_text("seed: 0\n", encoding="utf-8")
    tracker = TrackerProcess(rundir)
    try:
        with tracker.client("learner") as learner, tracker.client("actor", "actor-1") as actor:
            for step in range(3):
                learner.log(step, loss=0.5 * step, bad=float("nan"))
                actor.log(step, tokens=100.0 + step)
            learner.log(9, **dict.fromkeys(ODD_NAMES, 1.0))
        tracker.wait_for("recording in MLflow run")
        printed = tracker.stop()
    finally:
        tracker.kill()
    return rundir, printed


def test_metrics_of_several_roles_are_on_one_finished_run(recorded: tuple[RunDir, str]) -> None:
    runs = recorded[0].path.parent
    assert query(runs, "select name, status from runs") == [("one", "FINISHED")]
    rows = query(runs, "select key, step, value from metrics order by key, step")
    assert [row for row in rows if row[0] == "learner/loss"] == [
        ("learner/loss", step, 0.5 * step) for step in range(3)
    ]
    assert [row for row in rows if row[0] == "actor/actor-1/tokens"] == [
        ("actor/actor-1/tokens", step, 100.0 + step) for step in range(3)
    ]


def test_odd_names_are_mended_and_a_nan_is_counted(recorded: tuple[RunDir, str]) -> None:
    rows = query(recorded[0].path.parent, "select key, value from metrics")
    names = {name for name, _ in rows}
    expected = {"a/b", "lead", "tail", "up", "top_1_", "_n_code", "x" * 128, "sp ace"}
    assert {f"learner/{name}" for name in expected} <= names
    assert "learner/bad" not in names
    assert ("tracker/nonfinite_values", 3.0) in rows
    assert max(value for name, value in rows if name == "tracker/refused_metrics") == 0


def test_long_params_are_cut_and_the_whole_configuration_is_an_artifact(recorded: tuple[RunDir, str]) -> None:
    runs = recorded[0].path.parent
    params = dict(query(runs, "select key, value from params"))
    assert params["model.path"] == "p" * MAX_PARAM
    assert params["learner.optimizer.lr"] == str(Config().learner.optimizer.lr)
    (artifact,) = (runs / "mlartifacts").rglob("config.yaml")
    assert artifact.read_text(encoding="utf-8") == "seed: 0\n"


def test_the_run_directory_knows_the_mlflow_run(recorded: tuple[RunDir, str]) -> None:
    rundir = recorded[0]
    entry = json.loads((rundir.tracking / "mlflow.json").read_text())
    assert query(rundir.path.parent, "select run_uuid from runs") == [(entry["run_id"],)]


def test_the_tracker_says_little_and_litters_nothing(recorded: tuple[RunDir, str]) -> None:
    rundir, printed = recorded
    assert len(printed.splitlines()) <= 3, printed
    assert not (rundir.tracking / "spool.jsonl").exists()
    assert {entry.name for entry in rundir.path.parent.iterdir()} == {"one", "mlflow.db", "mlartifacts"}


@pytest.mark.slow
def test_a_server_that_is_down_is_waited_for_with_a_spool_that_the_next_tracker_sends(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "one")
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed_port = server.getsockname()[1]
    tracker = TrackerProcess(rundir, f"http://127.0.0.1:{closed_port}")
    try:
        with tracker.client("learner") as learner:
            for step in range(50):
                learner.log(step, loss=1.0)
        tracker.wait_for("MLflow failed")
        tracker.stop()
        assert len((rundir.tracking / "spool.jsonl").read_text().splitlines()) == 50
        tracker = TrackerProcess(rundir)
        tracker.wait_for("recording in MLflow run")
        tracker.stop()
    finally:
        tracker.kill()
    assert query(tmp_path, "select count(*) from metrics where key = 'learner/loss'") == [(50,)]
    assert not (rundir.tracking / "spool.jsonl").exists()


@pytest.mark.slow
def test_a_tracker_that_was_killed_takes_up_its_mlflow_run_again(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "one")
    tracker = TrackerProcess(rundir)
    try:
        tracker.wait_for("recording in MLflow run")
        tracker.kill()
        assert query(tmp_path, "select status from runs") == [("RUNNING",)]
        tracker = TrackerProcess(rundir)
        with tracker.client("learner") as learner:
            learner.log(1, loss=1.0)
        tracker.wait_for("recording in MLflow run")
        tracker.stop()
    finally:
        tracker.kill()
    assert query(tmp_path, "select status from runs") == [("FINISHED",)]
    assert query(tmp_path, "select count(*) from metrics where key = 'learner/loss'") == [(1,)]


@pytest.mark.slow
def test_a_server_that_never_answers_blocks_neither_the_roles_nor_the_end(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "one")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracker = TrackerProcess(rundir, f"http://127.0.0.1:{silent.getsockname()[1]}")
        try:
            with tracker.client("learner") as learner:
                began = time.monotonic()
                for step in range(3000):
                    learner.log(step, loss=1.0)
                    time.sleep(0.001)
                assert time.monotonic() - began < 15
                assert learner.dropped == 0
            tracker.stop()
        finally:
            tracker.kill()
    assert len((rundir.tracking / "spool.jsonl").read_text().splitlines()) == 3000


# -------------------------------------------------------------------------------------------- names


@given(st.text(max_size=300))
def test_every_name_becomes_one_that_mlflow_takes(name: str) -> None:
    """The rules of mlflow.utils.validation (3.17), written out."""
    cleaned = clean_name(name)
    assert 0 < len(cleaned) <= 250
    assert all(letter.isascii() and (letter.isalnum() or letter in "_-. :/") for letter in cleaned)
    assert posixpath.normpath(cleaned) == cleaned
    assert not cleaned.startswith(("..", "/"))
    assert cleaned != "."
    assert clean_name(cleaned) == cleaned


def test_names_that_are_fine_stay_as_they_are() -> None:
    for name in ("learner/loss", "a.b-c_d: e/f", "learner/optimizer.lr"):
        assert clean_name(name) == name


def test_params_are_every_setting_under_its_dotted_name() -> None:
    config = Config(
        model=ModelConfig(path="x" * 5000),
        cluster=ClusterConfig(actors=3),
        tracking=TrackingConfig(experiment="e"),
    )
    params = flat_params(config)
    assert params["cluster.actors"] == "3"
    assert "role" not in params, "the tracker's own role says nothing about the run"
    assert params["deterministic"] == "false"
    assert params["audit.actor_dirs"] == "[]"
    assert len(params["model.path"]) == 5000
    assert len(clean_params(params)["model.path"]) == MAX_PARAM
