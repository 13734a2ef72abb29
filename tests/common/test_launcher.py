"""role=local with stand-ins for the roles: the order of things, what each child is told, and every way to end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import common.launcher
import common.supervisor
from common.config import Config
from common.errors import StorageError
from common.launcher import role_command, run_local
from common.manifest import MANIFEST_FILE, Manifest, encode_manifest, step_name
from common.metrics import MetricsClient
from common.rundir import RunDir
from common.supervisor import RoleLost

FAKE = Path(__file__).with_name("fake_role.py")
ROOT = Path(__file__).resolve().parents[2]


def fake_command(role: str, words: Sequence[str]) -> list[str]:
    return [sys.executable, str(FAKE), role, *words]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run in an empty directory, with short waits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(common.supervisor, "BACKOFF_S", 0.05)
    monkeypatch.setattr(common.supervisor, "TICK_S", 0.02)
    monkeypatch.setattr(common.launcher, "PROGRESS_S", 0.2)
    config = Config()
    config.tracking.enabled = False
    config.cluster.actors = 1
    config.learner.steps = 2
    return config


@pytest.fixture
def habits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """How the stand-ins behave."""

    def set_habits(**habits: Any) -> None:
        monkeypatch.setenv("TREEWARD_FAKE", json.dumps(habits))

    set_habits()
    return set_habits


def only_run() -> Path:
    [run] = Path("runs").iterdir()
    return run


def left_behind() -> list[psutil.Process]:
    """Processes that a launcher should have ended. Another test of this worker may have begun the resource
    tracker of multiprocessing, which stays."""
    return [c for c in psutil.Process().children() if "resource_tracker" not in " ".join(c.cmdline())]


def test_a_whole_run_ends_with_the_success_before_and_after(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_local(config, fake_command) == 0
    lines = capsys.readouterr().out.splitlines()
    run = only_run()
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


def test_an_actor_starts_in_an_empty_directory_and_is_told_no_path(
    config: Config, habits: Callable[..., None]
) -> None:
    config.cluster.actors = 2
    habits(actors=2)
    assert run_local(config, fake_command) == 0
    for name in ("actor-0", "actor-1"):
        seen = json.loads((only_run() / "actors" / name / "seen.json").read_text())
        assert seen["found"] == []
        assert f"actor.name={name}" in seen["words"] and "actor.dir=." in seen["words"]
        assert any(word.startswith("cluster.allocator=tcp://127.0.0.1:") for word in seen["words"])
        assert not any(
            word.startswith(("run=", "role=")) or str(Path.cwd()) in word for word in seen["words"]
        )


def test_the_resolved_configuration_is_recorded(config: Config, habits: Callable[..., None]) -> None:
    assert run_local(config, fake_command) == 0
    text = (only_run() / "config.yaml").read_text()
    assert "seed: 0\n" in text and f"  batch_trees: {config.learner.batch_trees}\n" in text


def test_an_actor_that_crashes_is_started_again_and_the_run_goes_on(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    habits(actor="crash once")
    assert run_local(config, fake_command) == 0
    out = capsys.readouterr().out
    assert "actor-0 stopped (exit code 1): restart 1 of 5 in 0.05 s; it said: out of luck" in out


def test_a_learner_that_crashes_stops_everything_with_its_sentence_and_code(
    config: Config, habits: Callable[..., None]
) -> None:
    habits(learner="crash")
    with pytest.raises(
        RoleLost, match=r"learner stopped \(exit code 4\).*the disk is full.*learner\.out"
    ) as raised:
        run_local(config, fake_command)
    assert raised.value.exit_code == 4
    assert not left_behind()


def test_a_learner_that_is_killed_is_started_again_and_the_run_goes_on(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    habits(learner="die once")
    assert run_local(config, fake_command) == 0
    assert "learner stopped (killed by SIGKILL" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- going on


def resumed(config: Config, **learner: Any) -> Config:
    config.run = config.resume = str(only_run())
    (only_run() / "finished").unlink(missing_ok=True)  # by which the stand-ins know that all is trained
    for name, value in learner.items():
        setattr(config.learner, name, value)
    return config


def checkpoint(step: int) -> None:
    folder = only_run() / "learner" / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(2, step, {})))


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_an_interrupted_run_goes_on_and_what_was_done_is_not_done_again(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    habits(learner="crash")
    with pytest.raises(RoleLost):
        run_local(config, fake_command)
    before = only_run() / "eval" / "before.json"
    before.parent.mkdir(exist_ok=True)
    before.write_text(
        json.dumps({mode: {"success": 0.11, "low": 0.0, "high": 0.2} for mode in ("sampled", "greedy")})
    )
    checkpoint(1)
    with (only_run() / "logs" / "learner.log").open("w") as log:
        log.write(json.dumps({"level": "warning", "message": "of the process that died"}) + "\n")
    capsys.readouterr()
    habits()
    assert run_local(resumed(config), fake_command) == 0
    lines = lines_of(capsys)
    assert lines[0] == f"resuming {only_run()} at step 1/2"
    assert lines[-1].startswith("held-out success 0.11 -> 0.78"), "the first evaluation was not made again"
    assert not any("warm start: a few" in line or "that died" in line for line in lines)


def test_a_run_that_is_complete_is_left_alone_until_it_is_to_become_longer(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_local(config, fake_command) == 0
    checkpoint(2)
    summary = (only_run() / "summary.json").read_bytes()
    capsys.readouterr()
    assert run_local(resumed(config), fake_command) == 0
    (line,) = lines_of(capsys)
    assert line == (
        f"{only_run()} is complete, its 2 updates are trained and evaluated: "
        "a larger learner.steps= goes on from there"
    )
    assert (only_run() / "summary.json").read_bytes() == summary
    assert run_local(resumed(config, steps=3), fake_command) == 0
    assert lines_of(capsys)[0] == f"resuming {only_run()} at step 2/3"
    assert "  steps: 3\n" in (only_run() / "config.yaml").read_text()


def test_a_run_that_ended_before_its_evaluation_is_only_evaluated(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_local(config, fake_command) == 0
    checkpoint(2)
    (only_run() / "summary.json").unlink()
    (only_run() / "logs" / "actor-0.out").unlink()
    capsys.readouterr()
    going_on = resumed(config)
    (only_run() / "finished").touch()
    assert run_local(going_on, fake_command) == 0
    assert lines_of(capsys)[-1].startswith("held-out success 0.41 -> 0.78")
    assert not (only_run() / "logs" / "actor-0.out").exists(), "no actor was started"


def test_a_run_of_a_launcher_that_just_died_is_taken_up_when_its_roles_have_followed(
    config: Config, habits: Callable[..., None]
) -> None:
    assert run_local(config, fake_command) == 0
    (only_run() / "summary.json").unlink()
    held = RunDir(only_run()).lock("learner")
    timer = threading.Timer(0.5, held.release)
    timer.start()
    assert run_local(resumed(config), fake_command) == 0
    timer.join()


def test_the_tracker_is_told_that_a_run_has_failed(
    config: Config, habits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []

    class Recorder(MetricsClient):
        def goodbye(self, code: int, reason: str) -> None:
            told.append((code, reason))

    monkeypatch.setattr(common.launcher, "MetricsClient", Recorder)
    config.tracking.enabled = True
    habits(learner="crash")
    with pytest.raises(RoleLost):
        run_local(config, fake_command)
    [(code, reason)] = told
    assert code == 4 and "the disk is full" in reason


def test_a_role_that_does_not_leave_is_ended(
    config: Config,
    habits: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(common.launcher, "DRAIN_S", 0.3)
    habits(allocator="stay")
    assert run_local(config, fake_command) == 0
    assert "allocator did not leave within 0.3 s: ended" in capsys.readouterr().out


def test_a_tree_that_was_lost_fails_the_run_and_is_named(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    habits(allocator="lose a tree")
    assert run_local(config, fake_command) == 1
    out = capsys.readouterr().out
    assert "lost: tree=0: opened" in out and out.splitlines()[-1].startswith("held-out success")


def test_a_tracker_that_never_comes_does_not_stop_the_run(
    config: Config,
    habits: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    habits(tracker="never comes")
    monkeypatch.setattr(common.launcher, "TRACKER_START_S", 0.2)
    config.tracking.enabled = True
    assert run_local(config, fake_command) == 0
    assert "the tracker is not ready after 0.2 s: going on" in capsys.readouterr().out


def test_everyone_is_told_where_the_tracker_listens(config: Config, habits: Callable[..., None]) -> None:
    config.tracking.enabled = True
    assert run_local(config, fake_command) == 0
    words = json.loads((only_run() / "actors/actor-0/seen.json").read_text())["words"]
    [tracker] = [word for word in words if word.startswith("cluster.tracker=")]
    assert tracker != f"cluster.tracker={Config().cluster.tracker}"


@pytest.mark.parametrize(
    "files, uri, said",
    [
        (["mlflow.json"], "", "everything measured is shown by: make mlflow"),
        (["mlflow.json"], "http://u:secret@h:1", "everything measured is in http://h:1"),
        (["spool.jsonl"], "http://u:secret@h:1", "not all metrics have reached http://h:1 (see runs/"),
        (["mlflow.json", "spool.jsonl"], "", "not all metrics have reached sqlite:///runs/mlflow.db"),
        ([], "http://h:1", "metrics were not all recorded in http://h:1: see runs/"),
    ],
)
def test_the_last_lines_say_whether_the_metrics_arrived_where_they_should(
    files: list[str],
    uri: str,
    said: str,
    config: Config,
    habits: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    habits(tracker=files)
    config.tracking.enabled, config.tracking.uri = True, uri
    assert run_local(config, fake_command) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert said in line and "secret" not in line
    assert ("make mlflow" in line) == ("make mlflow" in said)
    assert ("python run.py role=tracker run=runs/" in line) == ("spool.jsonl" in files)


def test_a_warning_of_the_tracker_is_shown_while_the_run_goes_on(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    habits(tracker="warn")
    config.tracking.enabled = True
    assert run_local(config, fake_command) == 0
    assert "tracker: MLflow failed, metrics wait in the spool" in capsys.readouterr().out


def test_success_on_another_split_is_not_called_held_out(
    config: Config, habits: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    config.eval.split = "train"
    assert run_local(config, fake_command) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("success on the split train 0.41 -> 0.78 (200")


def test_a_run_with_a_warm_start_is_not_warmed_up_again(config: Config, habits: Callable[..., None]) -> None:
    rundir = RunDir.create(Path("runs"), "mine")
    rundir.write_json_atomic(rundir.warmstart_model / "config.json", {})
    config.run = "runs/mine"
    assert run_local(config, fake_command) == 0
    assert not (rundir.path / "logs/warmstart.out").exists()


def test_a_run_that_was_trained_or_is_in_use_is_refused(config: Config, habits: Callable[..., None]) -> None:
    assert run_local(config, fake_command) == 0
    config.run = str(only_run())
    warm = role_command("warmstart", [f"run={config.run}"])
    refused = subprocess.run(warm, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 4 and "has been trained already" in refused.stderr
    with pytest.raises(StorageError, match="has been trained already"):
        run_local(config, fake_command)
    rundir = RunDir.create(Path("runs"), "other")
    config.run = str(rundir.path)
    with rundir.lock("local"), pytest.raises(StorageError, match=f"process {os.getpid()}"):
        run_local(config, fake_command)


def test_children_are_started_from_this_installation() -> None:
    assert role_command("actor", ["seed=1"]) == [sys.executable, str(ROOT / "run.py"), "role=actor", "seed=1"]


# ------------------------------------------------------------------------------- how a launcher may die

DRIVER = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(FAKE.parent)!r}]
from common.config import Config
from common.launcher import run_local
from common import supervisor
config = Config()
config.cluster.actors = 2
sys.exit(run_local(config, lambda role, words: [sys.executable, {str(FAKE)!r}, role, *words]))
"""


@pytest.fixture
def launcher(tmp_path: Path, habits: Callable[..., None]) -> subprocess.Popen[str]:
    """A launcher in a process of its own, with a run that would never end."""
    habits(learner="endless")
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def children_of(launcher: subprocess.Popen[str], run_dir: Path) -> list[psutil.Process]:
    """Its children, once tracker, allocator, learner and two actors are running."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = psutil.Process(launcher.pid).children(recursive=True)
        if list(run_dir.glob("runs/*/training")) and len(found) >= 5:
            return found
        time.sleep(0.05)
    pytest.fail(f"the launcher did not get that far: {launcher.communicate()}")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_asked_to_stop_it_ends_all_children_and_says_one_line(
    number: signal.Signals, code: int, launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    children = children_of(launcher, tmp_path)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert err == ""
    assert re.fullmatch(
        rf"stopped by {number.name}: all processes have ended, run runs/\S+", out.splitlines()[-1]
    )
    assert not any(child.is_running() for child in children)


def test_killed_outright_it_takes_its_children_along_within_10_s(
    launcher: subprocess.Popen[str], tmp_path: Path
) -> None:
    children = children_of(launcher, tmp_path)
    launcher.kill()
    launcher.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_closed_terminal_does_not_end_the_run(launcher: subprocess.Popen[str], tmp_path: Path) -> None:
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    children = children_of(launcher, tmp_path)
    time.sleep(0.3)
    assert launcher.poll() is None and all(child.is_running() for child in children)
    launcher.terminate()
    assert launcher.wait(timeout=30) == 143
    assert launcher.stderr is not None and launcher.stderr.read() == ""
    launcher.stderr.close()
