"""A run that goes on under another launcher: what was done is not done again."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from common.errors import PeerLost, StorageError
from common.launcher import LocalRun
from common.manifest import MANIFEST_FILE, Manifest, encode_manifest, entries_of, step_name
from common.rundir import RunDir
from common.supervisor import RoleLost
from tests.common.launched import Launch


def resumed(launch: Launch, **learner: Any) -> Launch:
    launch.config.run = launch.config.resume = str(launch.path)
    (launch.path / "finished").unlink(missing_ok=True)  # by which the stand-ins know that all is trained
    for name, value in learner.items():
        setattr(launch.config.learner, name, value)
    return launch


def checkpoint(launch: Launch, step: int, **files: bytes) -> Path:
    """One of these files, complete."""
    folder = launch.path / "learner" / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(2, step, entries_of(files))))
    return folder


def test_an_interrupted_run_goes_on_and_what_was_done_is_not_done_again(launch: Launch) -> None:
    launch.habits(learner="crash")
    with pytest.raises(RoleLost):
        launch.run()
    before = launch.path / "eval" / "before.json"
    before.parent.mkdir(exist_ok=True)
    before.write_text(
        json.dumps({mode: {"success": 0.11, "low": 0.0, "high": 0.2} for mode in ("sampled", "greedy")})
    )
    checkpoint(launch, 1)
    with (launch.path / "logs" / "learner.log").open("w") as log:
        log.write(json.dumps({"level": "warning", "message": "of the process that died"}) + "\n")
    launch.said()
    launch.habits()
    assert resumed(launch).run() == 0
    lines = launch.lines()
    assert lines[0] == f"resuming {launch.path} at step 1/2"
    assert lines[-1].startswith("held-out success 0.11 -> 0.78"), "the first evaluation was not made again"
    assert not any("warm start: a few" in line or "that died" in line for line in lines)


def test_a_run_that_is_complete_is_left_alone_until_it_is_to_become_longer(launch: Launch) -> None:
    assert launch.run() == 0
    checkpoint(launch, 2)
    summary = (launch.path / "summary.json").read_bytes()
    launch.said()
    assert resumed(launch).run() == 0
    (line,) = launch.lines()
    assert line == (
        f"{launch.path} is complete, its 2 updates are trained and evaluated: "
        "a larger learner.steps= goes on from there"
    )
    assert (launch.path / "summary.json").read_bytes() == summary
    assert resumed(launch, steps=3).run() == 0
    assert launch.lines()[0] == f"resuming {launch.path} at step 2/3"
    assert "  steps: 3\n" in (launch.path / "config.yaml").read_text()


@pytest.mark.parametrize("left", [b"model", b"mode"], ids=["another byte", "too short"])
def test_a_complete_run_whose_last_checkpoint_was_damaged_since_is_trained_again_from_the_one_before(
    left: bytes, launch: Launch
) -> None:
    """The first kind would have counted as complete: sizes say nothing of bytes."""
    assert launch.run() == 0
    checkpoint(launch, 1, model=b"other")
    (checkpoint(launch, 2, model=b"MODEL") / "model").write_bytes(left)
    (launch.path / "logs" / "learner.out").unlink()
    launch.said()
    assert resumed(launch).run() == 0
    assert launch.lines()[0] == f"resuming {launch.path} at step 1/2"
    assert (launch.path / "logs" / "learner.out").exists(), "the learner was started"


@pytest.mark.parametrize("aside", [False, True], ids=["as it is", "set aside before"])
def test_a_run_without_any_sound_checkpoint_is_refused_before_anything_is_started(
    aside: bool, launch: Launch
) -> None:
    assert launch.run() == 0
    for step in (1, 2):
        folder = checkpoint(launch, step, model=b"MODEL")
        (folder / "model").write_bytes(b"model")
        if aside:
            folder.rename(folder.with_name(f"corrupt-{folder.name}"))
    shutil.rmtree(launch.path / "logs")
    what = r"the newest: runs/\S+/step-00000002/model is damaged: its SHA-256"
    if aside:
        what = r"runs/\S+/checkpoints holds none but such as were set aside"
    with pytest.raises(StorageError, match=rf"^no checkpoint of runs/\S+ is sound, {what}.*from a copy"):
        resumed(launch).run()
    assert not (launch.path / "logs").exists() or not any((launch.path / "logs").iterdir())


def test_a_run_that_fell_back_is_complete_only_once_its_new_weights_are_evaluated(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch.run() == 0
    checkpoint(launch, 1, model=b"one")
    last = checkpoint(launch, 2, model=b"two") / "model"
    last.write_bytes(b"twO")

    def interrupted(_self: LocalRun, when: str, _checkpoint: str) -> None:
        if when == "after":
            raise PeerLost("interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(LocalRun, "start_evaluation", interrupted)
        with pytest.raises(PeerLost):
            resumed(launch).run()
    last.write_bytes(b"two")  # the learner made it again
    launch.said()
    assert resumed(launch).run() == 0
    assert "is complete" not in launch.said(), "the summary was of the weights that were lost"


def test_a_run_that_ended_before_its_evaluation_is_only_evaluated(launch: Launch) -> None:
    assert launch.run() == 0
    checkpoint(launch, 2)
    (launch.path / "summary.json").unlink()
    (launch.path / "logs" / "actor-0.out").unlink()
    launch.said()
    resumed(launch)
    (launch.path / "finished").touch()
    assert launch.run() == 0
    assert launch.lines()[-1].startswith("held-out success 0.41 -> 0.78")
    assert not (launch.path / "logs" / "actor-0.out").exists(), "no actor was started"


def test_a_run_of_a_launcher_that_just_died_is_taken_up_when_its_roles_have_followed(launch: Launch) -> None:
    assert launch.run() == 0
    (launch.path / "summary.json").unlink()
    held = RunDir(launch.path).lock("learner")
    timer = threading.Timer(0.5, held.release)
    timer.start()
    assert resumed(launch).run() == 0
    timer.join()
