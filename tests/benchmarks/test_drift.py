"""Drift is a distance: none between equal runs, known ones between runs made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import drift as benchmark
from benchmarks.drift import Course, differing, drift
from benchmarks.results import BenchmarkFailed, begin
from common.rundir import RunDir

START = np.array([3.0, 4.0, 0.0])


def course(name: str, *steps: tuple[float, float, float], success: tuple[float, ...] = (0.5,)) -> Course:
    return Course(name, list(success), [START, *(START + np.array(step) for step in steps)])


def test_equal_runs_are_not_apart_and_a_run_that_stands_still_is_not_divided_by_zero() -> None:
    still = course("a", (0, 0, 0))
    assert drift(still, still) == benchmark.Drift([0.0], [0.0], [0.0])
    moved = course("a", (1, 0, 0))
    assert drift(moved, moved).apart == [0.0] and differing(moved, moved) == 0


def test_right_angles_opposite_ways_and_success_come_out_as_computed_by_hand() -> None:
    a = course("a", (0, 0, 1), (0, 0, 2), success=(0.25, 1.0))
    b = course("b", (0, 1, 0), (0, 0, -2), success=(0.5, 0.0))
    found = drift(a, b)
    assert found.success == [0.25, 1.0]
    assert found.apart == pytest.approx([math.sqrt(2), 2.0])
    assert found.weights == pytest.approx([math.sqrt(2) / math.sqrt(26), 4 / math.sqrt(29)])
    assert differing(a, b) == 3


def test_runs_that_began_elsewhere_or_ended_early_are_refused() -> None:
    other = Course("b", [0.5], [START + 1, START])
    for wrong in (other, course("b", (0, 0, 1), (0, 0, 1))):
        with pytest.raises(BenchmarkFailed, match="a and b cannot be compared"):
            drift(course("a", (0, 0, 1)), wrong)


def test_a_course_is_read_from_checkpoints_in_order_and_from_the_learner_log(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    events = [{"event": "serving"}, *({"event": "progress", "success": share} for share in (0.25, 0.75))]
    rundir.log_file("learner").write_text("".join(json.dumps(event) + "\n" for event in events))
    for step in (2, 0, 1):
        folder = rundir.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        tensors = {"b": np.full((1, 2), step, np.float32), "a": np.full(1, 10 + step, np.float32)}
        save_file(tensors, folder / "model.safetensors")
    found = benchmark.read_course("run", rundir)
    assert found.success == [0.25, 0.75]
    assert [list(vector) for vector in found.weights] == [[10, 0, 0], [11, 1, 1], [12, 2, 2]]


def test_the_report_names_every_pair_and_its_last_line_the_figures(tmp_path: Path) -> None:
    courses = {
        "repeat-0": course("repeat-0", (0, 0, 1)),
        "repeat-1": course("repeat-1", (0, 0, 1.5), success=(0.25,)),
        "other-seed": course("other-seed", (0, 1, 0)),
        "deterministic-0": course("deterministic-0", (1, 0, 0)),
        "deterministic-1": course("deterministic-1", (1, 0, 0)),
    }
    line = benchmark.report(begin("drift", []), courses, tmp_path)
    assert line == "drift: success=0.250 weights=0.098 apart=0.400 apart_other_seed=1.428 deterministic=0"
    content = json.loads((tmp_path / "drift.json").read_text())
    pairs = [run["pair"] for run in content["runs"]]
    assert pairs[:2] == ["repeat-0, repeat-1", "repeat-0, other-seed"] and len(pairs) == 4
