"""The benchmark of the ring, from its command line to its results file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.results import ROOT
from benchmarks.ring import options, plan
from benchmarks.ring_figures import HEADLINE


def test_the_repeats_are_equal_and_the_sensitivity_control_differs_in_one_setting() -> None:
    runs = plan(options(["--seed=4", "--steps=9"]), ["experiment=smoke"])
    assert list(runs) == ["repeat-0", "repeat-1", "repeat-2", "synchronous"]
    assert runs["repeat-0"] == runs["repeat-1"] == runs["repeat-2"]
    assert runs["repeat-0"] == ["experiment=smoke", "seed=4", "learner.steps=9", "eval.tasks=1"]
    assert runs["synchronous"] == [*runs["repeat-0"], "learner.max_policy_lag=0"]


def test_the_quick_tier_is_two_short_runs() -> None:
    assert list(plan(options(["--quick"]), [])) == ["repeat-0", "repeat-1"]
    assert options(["--quick"]).steps < options([]).steps


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_run_is_measured_from_end_to_end(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.ring",
        "--quick",
        "--repeats=1",
        f"--work={tmp_path / 'work'}",
    ]
    command += [f"--results={tmp_path}", "--", "experiment=smoke", "tracking.enabled=false"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "ring-quick.json").read_text())
    assert done.stdout.splitlines()[-1] == found["last_line"]
    assert found["last_line"].startswith("ring: rollout_tokens_per_s=")
    (run,) = found["runs"]
    assert all(run[name] > 0 for name in HEADLINE if not name.endswith("wait"))
    assert all(0 <= run[name] <= 1 for name in HEADLINE if name.endswith("wait"))
    assert run["tokens"]["trained"] > 0 and set(run["actors"]) == {"actor-0", "actor-1"}
    assert run["wire"]["weights"] > run["wire"]["metrics"] == 0
