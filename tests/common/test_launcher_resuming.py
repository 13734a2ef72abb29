"""A run that goes on under another launcher: what was done is not done again."""

import json
import threading
from typing import Any

import pytest

from common.manifest import MANIFEST_FILE, Manifest, encode_manifest, step_name
from common.rundir import RunDir
from common.supervisor import RoleLost
from tests.common.launched import Launch


def resumed(launch: Launch, **learner: Any) -> Launch:
    launch.config.run = launch.config.resume = str(launch.path)
    (launch.path / "finished").unlink(missing_ok=True)  # by which the stand-ins know that all is trained
    for name, value in learner.items():
        setattr(launch.config.learner, name, value)
    return launch


def checkpoint(launch: Launch, step: int) -> None:
    folder = launch.path / "learner" / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / MANIFEST_FILE).write_bytes(encode_manifest(Manifest(2, step, {})))


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
