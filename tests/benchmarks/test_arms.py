"""Every arm starts from the same weights and differs from the default in one thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import arms
from benchmarks.arms import Bench, run_arm
from benchmarks.results import BenchmarkFailed
from common.config import Config
from common.opening import record
from common.rundir import RunDir

SUCCESSES = {"before": "0001", "after": "0111", "supervised": "0011", "supervised_tenth": "0001"}


def evaluation(successes: str) -> dict[str, Any]:
    episodes = [{"task": task, "success": bit == "1"} for task, bit in enumerate(successes)]
    rate = successes.count("1") / len(successes)
    return {"success": rate, "low": 0.0, "high": 1.0, "mean_turns": 2.0, "tasks": 4, "per_task": episodes}


class Machine:
    """Does what `run.py` and the supervised process would, as far as files go; records what was asked."""

    def __init__(self) -> None:
        self.trained: list[dict[str, str]] = []
        self.evaluated: list[dict[str, str]] = []
        self.supervised: list[dict[str, str]] = []

    def run_role(self, name: str, words: list[str], log: Path) -> float:
        asked = dict(word.split("=", 1) for word in words)
        (self.evaluated if asked.get("role") == "eval" else self.trained).append(asked)
        if asked.get("role") == "eval":
            both = evaluation(SUCCESSES[asked["eval.name"].removeprefix("held-out-")])
            result = {"sampled": both, "greedy": both}
            RunDir.write_json_atomic(Path(asked["run"]) / "eval" / f"{asked['eval.name']}.json", result)
        else:
            path = Path(asked["run"])
            record(RunDir.create(path.parent, path.name), Config())
            when = {when: {"sampled": evaluation(SUCCESSES[when])} for when in ("before", "after")}
            times = {"parts_s": {"warm start": 20.0, "training": 200.0}, "total_s": 220.0}
            RunDir.write_json_atomic(path / "summary.json", {**when, **times})
        return 1.0

    def run_command(self, name: str, command: list[str], log: Path) -> float:
        assert command[1:3] == ["-m", "benchmarks.supervised"]
        self.supervised.append(dict(word.removeprefix("--").split("=", 1) for word in command[3:]))
        return 1.0


@pytest.fixture(name="machine")
def fake_machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(arms, "run_role", machine.run_role)
    monkeypatch.setattr(arms, "run_command", machine.run_command)
    return machine


@pytest.fixture(name="bench")
def bench_of_seed_7(tmp_path: Path) -> Bench:
    return Bench(7, ("learner.steps=3",), 4, tmp_path / "work", lambda line: None)


def test_the_default_is_run_as_it_is_and_evaluated_from_its_warm_start_to_its_newest_checkpoint(
    machine: Machine, bench: Bench
) -> None:
    (entry,) = run_arm(bench, "default", None)
    path = str(bench.path("default"))
    assert machine.trained == [
        {"learner.steps": "3", "seed": "7", "run": path, "runs_dir": str(bench.work.absolute())}
    ]
    models = [asked["eval.checkpoint"] for asked in machine.evaluated]
    assert models == [f"{path}/warmstart/model", ""]
    assert all((asked["run"], asked["eval.tasks"]) == (path, "4") for asked in machine.evaluated)
    assert (entry["warm_start_s"], entry["training_s"], entry["total_s"]) == (20.0, 200.0, 220.0)
    assert entry["own_maps"] == {"tasks": 4, "before": 0.25, "after": 0.75}
    assert entry["sampled"]["gain"]["mean"] == 0.5
    json.dumps(entry)


@pytest.mark.parametrize(
    "arm, key, value", [("lr0", "learner.optimizer.lr", "0"), ("shuffled", "learner.shuffle_rewards", "true")]
)
def test_a_null_control_differs_from_the_default_in_one_setting_beside_its_start(
    machine: Machine, bench: Bench, arm: str, key: str, value: str
) -> None:
    (default,) = run_arm(bench, "default", None)
    (entry,) = run_arm(bench, arm, default)
    first, second = machine.trained
    changed = {name: text for name, text in second.items() if first.get(name) != text and name != "run"}
    assert changed == {key: value, "model.path": f"{bench.path('default')}/warmstart/model"}
    assert entry["sampled"]["before"] == default["sampled"]["before"], (
        "one evaluation of the start serves all"
    )


def test_the_supervised_control_has_the_seconds_of_the_training_and_a_tenth_of_them(
    machine: Machine, bench: Bench
) -> None:
    (default,) = run_arm(bench, "default", None)
    whole, tenth = run_arm(bench, "supervised", default)
    assert [float(asked["seconds"]) for asked in machine.supervised] == [200.0, 20.0]
    assert all(asked["run"] == str(bench.path("default")) for asked in machine.supervised)
    assert [asked["eval.checkpoint"] for asked in machine.evaluated[2:]] == [
        asked["out"] for asked in machine.supervised
    ]
    assert (whole["arm"], whole["sampled"]["gain"]["mean"]) == ("supervised", 0.25)
    assert (tenth["arm"], tenth["sampled"]["gain"]["mean"]) == ("supervised_tenth", 0.0)


@pytest.mark.parametrize("arm", ["lr0", "shuffled", "supervised"])
def test_no_arm_is_run_without_the_start_that_the_default_makes(
    machine: Machine, bench: Bench, arm: str
) -> None:
    with pytest.raises(BenchmarkFailed, match="needs the default arm of seed 7"):
        run_arm(bench, arm, None)
    assert machine.trained == []


def test_a_run_that_left_no_summary_is_one_sentence(
    machine: Machine, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "run_role", lambda name, words, log: 1.0)
    with pytest.raises(BenchmarkFailed, match=r"left nothing readable at .*summary.json"):
        run_arm(bench, "default", None)
