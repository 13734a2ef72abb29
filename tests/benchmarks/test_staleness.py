"""The staleness benchmark: gaps paired by seed, arms that are kept, and data that are really that old."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import staleness
from benchmarks.cli import compose
from benchmarks.results import BenchmarkFailed
from benchmarks.staleness import ARMS, checks, gap, no_effect, words_of
from common.errors import ConfigError
from common.nouns import ids

SUCCESS = {
    "lag0": "1111", "lag4": "1110", "lag16": "1100", "null": "1111", "lag4-decoupled": "1110",
    "lag16-decoupled": "1110", "lag4-uncorrected": "1000", "lag16-uncorrected": "0000",
}  # fmt: skip


def rated(episodes: str) -> dict[str, Any]:
    rate = episodes.count("1") / len(episodes)
    return {"mean": rate, "low": rate, "high": rate, "mean_turns": 2.0, "episodes": episodes}


def entry(seed: int, arm: str) -> dict[str, Any]:
    lag, _, _ = ARMS[arm]
    after = {mode: rated(SUCCESS[arm]) for mode in ("sampled", "greedy")}
    return {
        "seed": seed, "arm": arm, "lag": lag, "updates": 3, "tokens": 30, "lags": {str(lag): 30},
        "after": after, "steps": [], "training_s": 1.0, "training_cpu_s": 1.0, "seconds": 1.0,
    }  # fmt: skip


class Arms:
    """Stands in for the trainings; `breaks_at` fails as an interrupted machine would."""

    def __init__(self, breaks_at: tuple[int, str] | None = None) -> None:
        self.ran: list[tuple[int, str]] = []
        self.breaks_at = breaks_at

    def __call__(self, arm: str, seed: int, args: object, overrides: object) -> dict[str, Any]:
        if (seed, arm) == self.breaks_at:
            raise BenchmarkFailed("the machine went away")
        self.ran.append((seed, arm))
        return entry(seed, arm)


@pytest.fixture(name="words")
def command_line(tmp_path: Path) -> list[str]:
    return [f"--work={tmp_path / 'work'}", f"--results={tmp_path / 'results'}", "--seeds=0,1"]


def run(monkeypatch: pytest.MonkeyPatch, words: list[str], arms: Arms) -> int:
    monkeypatch.setattr(staleness, "measure", arms)
    return staleness.main(words)


def test_every_arm_of_every_seed_is_run_once_and_the_last_line_is_the_headline(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = Arms()
    assert run(monkeypatch, words, arms) == 0
    assert arms.ran == [(seed, arm) for arm in ARMS for seed in (0, 1)]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "staleness: gap_lag4=0.250 gap_lag16=0.500 gap_lag16_uncorrected=1.000"
    found = json.loads((tmp_path / "results" / "staleness.json").read_text())
    assert found["last_line"] == last and len(found["runs"]) == 2 * len(ARMS)
    assert found["gaps"]["lag16/sampled"] == {"mean": 0.5, "bound": 0.5, "half": 0.0, "seeds": 2}
    assert [check["holds"] for check in found["checks"]] == [False, False, True]


def test_what_the_target_speaks_of_is_run_over_all_seeds_and_the_rest_over_the_first_five(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path
) -> None:
    arms = Arms()
    assert run(monkeypatch, [*words[:-1], "--seeds=0,1,2,3,4,5,6"], arms) == 0
    count = {arm: sum(ran == arm for _, ran in arms.ran) for arm in ARMS}
    assert {arm for arm, times in count.items() if times == 7} == {"lag0", "lag4", "null"}
    assert set(count.values()) == {5, 7}
    found = json.loads((tmp_path / "results" / "staleness.json").read_text())
    assert found["gaps"]["lag4/sampled"]["seeds"] == 7 and found["gaps"]["lag16/sampled"]["seeds"] == 5


def test_an_interrupted_benchmark_goes_on_with_the_arm_that_was_cut_off(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(BenchmarkFailed):
        run(monkeypatch, words, Arms(breaks_at=(0, "null")))
    assert not (tmp_path / "results").exists(), "half an experiment is no result"
    second = Arms()
    assert run(monkeypatch, words, second) == 0
    assert second.ran[0] == (0, "null") and len(second.ran) == 2 * (len(ARMS) - list(ARMS).index("null"))


def test_arms_finished_under_other_settings_do_not_count(
    monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    with pytest.raises(BenchmarkFailed):
        run(monkeypatch, words, Arms(breaks_at=(1, "lag0")))
    again = Arms()
    run(monkeypatch, [*words, "--tokens=7"], again)
    assert again.ran[0] == (0, "lag0")


def test_some_arms_alone_give_a_line_and_no_results_file(
    monkeypatch: pytest.MonkeyPatch, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [*words, "--only=lag0,lag4"], Arms()) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "staleness: gap_lag4=0.250" and "0/null" in out
    assert not (tmp_path / "results").exists()
    with pytest.raises(ConfigError, match="--only must be some of lag0"):
        run(monkeypatch, [*words, "--only=lag"], Arms())


def test_a_gap_is_paired_by_seed_and_its_bound_is_students_one_sided_limit() -> None:
    runs = [entry(seed, arm) for seed in range(5) for arm in ("lag0", "lag4")]
    for seed, success in enumerate((0.75, 0.85, 0.80, 0.90, 0.70)):
        runs[2 * seed + 1]["after"]["sampled"]["mean"] = success
    found = gap(runs, "lag4", "sampled")
    # Gaps 0.25, 0.15, 0.20, 0.10, 0.30: mean 0.2, s 0.0791; t(0.90, 4) = 1.533.
    assert found["mean"] == pytest.approx(0.2) and found["seeds"] == 5
    assert found["bound"] == pytest.approx(0.2 + 1.533 * 0.0790569 / math.sqrt(5))
    assert found["half"] == pytest.approx(2.776 * 0.0790569 / math.sqrt(5))
    assert gap(runs[:2], "lag4", "sampled") == {"mean": 0.25, "seeds": 1}
    assert gap(runs, "lag16", "sampled") == {}


def test_a_check_fails_by_the_mean_or_by_the_bound() -> None:
    assert [c["holds"] for c in checks({"mean": 0.05, "bound": 0.12, "seeds": 5})] == [True, True]
    assert [c["holds"] for c in checks({"mean": 0.06, "bound": 0.12, "seeds": 5})] == [False, True]
    assert [c["holds"] for c in checks({"mean": 0.05, "bound": 0.13, "seeds": 5})] == [True, False]
    assert len(checks({"mean": 0.05, "seeds": 1})) == 1


@pytest.mark.parametrize(
    "mean, half, holds", [(0.05, 0.05, True), (-0.05, 0.05, True), (0.05, 0.04, False), (-0.05, 0.04, False)]
)
def test_a_control_has_no_effect_where_its_interval_holds_zero(mean: float, half: float, holds: bool) -> None:
    (check,) = no_effect({"mean": mean, "bound": 9.0, "half": half, "seeds": 5})
    assert check["holds"] is holds and check["measured"] == f"{mean:.3f} ± {half:.3f} over 5 seeds"
    assert no_effect({"mean": mean, "seeds": 1}) == []


def test_every_arm_is_a_valid_configuration_with_k_equal_to_its_lag() -> None:
    args = staleness.options(["--quick"])
    for arm, (lag, _, _) in ARMS.items():
        config = compose(words_of(arm, 3, args, ()))
        assert (config.learner.max_policy_lag, config.seed) == (lag, 3)
        assert (config.learner.loss.name == "reinforce") is ("uncorrected" in arm)


# --------------------------------------------------------------------------------------- the real thing

TINY = (
    "experiment=smoke", "learner.max_policy_lag=2", "learner.optimizer.lr=0.01", "learner/weight=decoupled",
    "learner.optimizer.warmup_steps=0",
)  # fmt: skip


@pytest.mark.slow
def test_every_token_was_sampled_under_the_weights_that_its_version_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from benchmarks.stale_training import StaleTraining
    from common.tokenizer import WordTokenizer
    from envs.registry import make_env
    from learner.policy import build_model, load_model, model_files

    config = compose([*TINY, "seed=0"])
    tokenizer = WordTokenizer.build(make_env("frozenlake", {}).words)
    start = tmp_path / "start"
    start.mkdir()
    for name, data in model_files(build_model(config.model, tokenizer, seed=0), tokenizer).items():
        (start / name).write_bytes(data)
    training = StaleTraining(config, start, tmp_path / "scratch", lag=2, sampling_seed=0)
    seen = []
    real = training._update
    monkeypatch.setattr(training, "_update", lambda trees: (seen.extend(trees), real(trees)))
    folder = training.run(1800)

    course = training.course
    assert course.updates >= 4 and set(course.ages) == {0, 1, 2}
    assert sum(course.ages.values()) == course.tokens == sum(tree.num_action_tokens() for tree in seen)
    # Updates 0, 1 and 2 train what the starting weights sampled, update t what those of t − 2 did.
    first = {tree.nodes[-1].turn.versions[0].version.step for tree in seen if tree.wave == 2}
    assert first == {0}
    weights = [load_model(tmp_path / "scratch" / f"v0.{step}") for step in (0, 1)]
    for tree in (seen[0], next(tree for tree in seen if tree.wave == 3)):
        step = max(0, tree.wave - 2)
        gaps = [gap_to(model, tree, torch) for model in weights]
        assert gaps[step] < 1e-4 < gaps[1 - step], "sampled by those weights, and by no others"
    assert folder.name == f"v0.{course.updates}"


def gap_to(model: Any, tree: Any, torch: Any) -> float:
    """Greatest difference of a tree's log-probabilities from those of a model."""
    from common.nouns import floats

    worst = 0.0
    for node in tree.nodes[1:]:
        path = tree.walk(node.parent)
        context = [int(i) for n in path for part in (n.turn.action, n.turn.observation) for i in ids(part)]
        action = ids(node.turn.action).tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *action]])).logits[0]
        said = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
        found = said.gather(1, torch.tensor(action)[:, None]).squeeze(1)
        worst = max(worst, float((found - torch.tensor(floats(node.turn.logprobs).copy())).abs().max()))
    return worst
