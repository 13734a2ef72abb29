"""The controls go on where they were interrupted, and say at the end what holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import controls
from benchmarks.arms import ARMS, Bench
from benchmarks.gains import compare
from benchmarks.results import BenchmarkFailed
from common.errors import ConfigError

AFTER = {"default": ("0111", "1111"), "lr0": ("0001", "0011"), "shuffled": ("0001", "0011")}
SUPERVISED = {"supervised": ("0011", "0011"), "supervised_tenth": ("0011", "0111")}


def rated(episodes: str) -> dict[str, Any]:
    rate = episodes.count("1") / len(episodes)
    return {"mean": rate, "low": rate, "high": rate, "mean_turns": 2.0, "episodes": episodes}


def entry(seed: int, arm: str) -> dict[str, Any]:
    """As a real arm leaves it: a start of 1 in 4 sampled, 2 in 4 greedy."""
    before = {"sampled": rated("0001"), "greedy": rated("0011")}
    sampled, greedy = {**AFTER, **SUPERVISED}[arm]
    after = {"sampled": rated(sampled), "greedy": rated(greedy)}
    times = {"warm_start_s": 30.0, "training_s": 210.0, "total_s": 260.0}
    extra = {"own_maps": {"tasks": 4, "before": 0.25, "after": 0.75}, "evaluation_before": before}
    kept = extra if arm == "default" else {}
    return {"seed": seed, "arm": arm, "tasks": 4, **times, **compare(before, after), **kept}


class Arms:
    """Stands in for the runs; `breaks_at` fails as an interrupted machine would."""

    def __init__(self, breaks_at: tuple[int, str] | None = None) -> None:
        self.ran: list[tuple[int, str]] = []
        self.defaults: list[bool] = []
        self.words: list[tuple[str, ...]] = []
        self.breaks_at = breaks_at

    def __call__(self, bench: Bench, arm: str, default: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        if (bench.seed, arm) == self.breaks_at:
            raise BenchmarkFailed("the machine went away")
        self.ran.append((bench.seed, arm))
        self.defaults.append(default is not None and default["seed"] == bench.seed)
        self.words.append(bench.words)
        return [entry(bench.seed, name) for name in (SUPERVISED if arm == "supervised" else (arm,))]


@pytest.fixture(name="words")
def command_line(tmp_path: Path) -> list[str]:
    return [f"--work={tmp_path / 'work'}", f"--results={tmp_path / 'results'}", "--seeds=0,1"]


def run(monkeypatch: pytest.MonkeyPatch, words: list[str], arms: Arms) -> int:
    monkeypatch.setattr(controls, "run_arm", arms)
    return controls.main(words)


def test_every_arm_of_every_seed_is_run_once_and_the_last_line_is_the_headline(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arms = Arms()
    assert run(monkeypatch, words, arms) == 0
    assert arms.ran == [(seed, arm) for seed in (0, 1) for arm in ARMS]
    assert arms.defaults == [False, True, True, True] * 2, "the other arms start from their seed's default"
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "controls: gain=0.500 gain_lr0=0.000 gain_shuffled=0.000 gain_supervised=0.250 greedy_gain=0.500"
    )
    found = json.loads((tmp_path / "results" / "controls.json").read_text())
    assert found["last_line"] == last
    assert [(run["seed"], run["arm"]) for run in found["runs"]][:5] == [
        (0, arm) for arm in ("default", "lr0", "shuffled", "supervised", "supervised_tenth")
    ]
    assert all(len(run["sampled"]["after"]["episodes"]) == 4 and run["git"] for run in found["runs"])
    assert not (tmp_path / "work" / "partial.json").exists()


def test_an_interrupted_benchmark_goes_on_with_the_arm_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path
) -> None:
    first = Arms(breaks_at=(0, "shuffled"))
    with pytest.raises(BenchmarkFailed):
        run(monkeypatch, words, first)
    assert first.ran == [(0, "default"), (0, "lr0")]
    assert not (tmp_path / "results").exists(), "half an experiment is no result"
    second = Arms()
    assert run(monkeypatch, words, second) == 0
    assert second.ran[0] == (0, "shuffled") and len(first.ran) + len(second.ran) == 2 * len(ARMS)
    assert second.defaults[0], "what the default arm left is still known"
    assert (tmp_path / "results" / "controls.json").is_file()


@pytest.mark.parametrize("change", [["--tasks=7"], ["--", "learner.batch_trees=5"], ["--fresh"]])
def test_arms_finished_under_other_settings_do_not_count(
    monkeypatch: pytest.MonkeyPatch, words: list[str], change: list[str]
) -> None:
    with pytest.raises(BenchmarkFailed):
        run(monkeypatch, words, Arms(breaks_at=(0, "shuffled")))
    again = Arms()
    run(monkeypatch, [*words, *change], again)
    assert again.ran[0] == (0, "default")


def test_some_arms_alone_give_a_line_and_no_results_file(
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arms = Arms()
    assert run(monkeypatch, [*words, "--only=default,lr0"], arms) == 0
    assert {arm for _, arm in arms.ran} == {"default", "lr0"}
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "controls: gain=0.500 gain_lr0=0.000 greedy_gain=0.500"
    assert "0/shuffled" in out and not (tmp_path / "results").exists()


def test_overrides_reach_every_run_behind_those_of_the_quick_tier(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arms = Arms()
    words = [f"--work={tmp_path / 'w'}", f"--results={tmp_path / 'r'}", "--quick", "--", "experiment=smoke"]
    assert run(monkeypatch, words, arms) == 0
    assert arms.words[0] == ("learner.steps=20", "experiment=smoke")
    assert {seed for seed, _ in arms.ran} == {0}
    assert (tmp_path / "r" / "controls-quick.json").is_file()


@pytest.mark.parametrize(
    "word, sentence",
    [("learner.lr=1", "learner.optimizer.lr"), ("seed=3", "sets"), ("run=x", "sets"), ("--quick", "sets")],
)
def test_a_mistake_in_an_override_is_found_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, words: list[str], word: str, sentence: str
) -> None:
    arms = Arms()
    with pytest.raises(ConfigError, match=sentence):
        run(monkeypatch, [*words, "--", word], arms)
    assert arms.ran == []


def test_an_unknown_arm_is_refused(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--only must be some of default, lr0"):
        run(monkeypatch, [*words, "--only=lr"], Arms())


def test_each_check_holds_for_the_worst_seed_and_fails_with_one_bad_one() -> None:
    runs = [entry(seed, arm) for seed in (0, 1) for arm in (*AFTER, *SUPERVISED)]
    assert all(check["holds"] for check in controls.checks(runs))
    spoilt = {
        0: lambda run: run["own_maps"].update(before=0.6, after=0.9),
        1: lambda run: run["own_maps"].update(after=0.45),
        2: lambda run: run.update(training_s=350.0),
    }
    for place, spoil in spoilt.items():
        runs = [entry(seed, arm) for seed in (0, 1) for arm in (*AFTER, *SUPERVISED)]
        spoil(runs[5])
        assert [check["holds"] for check in controls.checks(runs)].index(False) == place
    nulls = [(arm, mode) for arm in ("lr0", "shuffled") for mode in ("sampled", "greedy")]
    for place, (arm, mode) in enumerate(nulls, start=3):
        runs = [entry(seed, arm) for seed in (0, 1) for arm in (*AFTER, *SUPERVISED)]
        next(run for run in runs if run["arm"] == arm)[mode]["gain"]["mean"] = 0.06
        assert [check["holds"] for check in controls.checks(runs)].index(False) == place


def test_the_supervised_rival_is_the_better_of_its_two_in_each_mode() -> None:
    runs = [entry(0, arm) for arm in (*AFTER, *SUPERVISED)]
    sampled, greedy = controls.checks(runs)[-2:]
    assert sampled["measured"].startswith("0.250") and greedy["measured"].startswith("0.250")
    runs[-1]["greedy"]["after"]["mean"] = 1.0
    assert not controls.checks(runs)[-1]["holds"], "a draw is no win"
