"""The arms of the controls: what is run for each, and what is kept of it.

    default      run.py as it is ─▶ warm start, training ─▶ evaluated before and after
    lr0          from that warm start, learner.optimizer.lr=0, as many updates: nothing can be learnt
    shuffled     from that warm start, learner.shuffle_rewards=true: rewards say nothing about actions
    supervised   from that warm start, more supervised steps for as long as the default's training took

All arms of a seed start from the same weights, so they share one evaluation before. Every evaluation plays
the same held-out maps with the same draws, after training, with nothing else running.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import run_command, run_role
from benchmarks.cli import compose, fresh_run
from benchmarks.gains import compact, compare
from benchmarks.results import BenchmarkFailed

OVERRIDES = {"lr0": "learner.optimizer.lr=0", "shuffled": "learner.shuffle_rewards=true"}
"""Arm -> the one setting in which it differs from the default."""
ARMS = ("default", *OVERRIDES, "supervised")
SUPERVISED_SHARES = {"supervised": 1.0, "supervised_tenth": 0.1}
"""Arm -> share of the training's seconds. The tenth has not repeated its few demonstrations so often."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where and how the arms of one seed run."""

    seed: int
    words: tuple[str, ...]
    """Settings of every run."""
    tasks: int
    """Held-out maps."""
    work: Path
    say: Callable[[str], None]

    def path(self, arm: str) -> Path:
        """Directory of an arm's run."""
        return self.work.absolute() / f"seed-{self.seed}-{arm}"

    def log(self, name: str) -> Path:
        return self.work.absolute() / f"seed-{self.seed}-{name}.out"

    def start(self) -> Path:
        """The weights all arms start from."""
        config = compose([f"run={self.path('default')}", "role=eval"])
        return Path(config.model.path or self.path("default") / "warmstart" / "model").absolute()


def run_arm(bench: Bench, arm: str, default: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Run an arm and evaluate it; what is kept, one entry for each model evaluated.

    Args:
        bench: of the seed.
        arm: one of `ARMS`.
        default: the entry of the seed's default arm, which every other arm needs.

    Raises:
        BenchmarkFailed: a process failed, or the default arm has not been run.
    """
    if arm == "default":
        return [_default(bench)]
    if default is None:
        raise BenchmarkFailed(f"{arm} needs the default arm of seed {bench.seed}: run --only default first")
    if arm == "supervised":
        return [_supervised(bench, name, share, default) for name, share in SUPERVISED_SHARES.items()]
    return [_control(bench, arm, default)]


def _default(bench: Bench) -> dict[str, Any]:
    summary = _train(bench, "default", bench.words)
    evaluations = {
        "before": _evaluate(bench, "default", bench.start(), "before"),
        "after": _evaluate(bench, "default", None, "after"),
    }
    own = {when: summary[when]["sampled"]["success"] for when in ("before", "after")}
    return {
        **_entry(bench, "default", evaluations["before"], evaluations["after"], summary),
        "own_maps": {"tasks": summary["after"]["sampled"]["tasks"], **own},
        "evaluation_before": evaluations["before"],
    }


def _control(bench: Bench, arm: str, default: Mapping[str, Any]) -> dict[str, Any]:
    words = [*bench.words, f"model.path={bench.start()}", OVERRIDES[arm]]
    summary = _train(bench, arm, words)
    return _entry(bench, arm, default["evaluation_before"], _evaluate(bench, arm, None, "after"), summary)


def _supervised(bench: Bench, arm: str, share: float, default: Mapping[str, Any]) -> dict[str, Any]:
    seconds, out = share * float(default["training_s"]), bench.path(arm)
    bench.say(f"    {arm}: {seconds:.0f} s of supervised steps")
    command = [sys.executable, "-m", "benchmarks.supervised", f"--run={bench.path('default')}"]
    took = run_command(arm, [*command, f"--out={out}", f"--seconds={seconds}"], bench.log(arm))
    after = _evaluate(bench, "default", out, arm)
    times = {"parts_s": {"training": seconds}, "total_s": took}
    return _entry(bench, arm, default["evaluation_before"], after, times)


def _train(bench: Bench, arm: str, words: Sequence[str]) -> dict[str, Any]:
    """A whole `role=local` run; its summary."""
    path = fresh_run(bench.path(arm))
    bench.say(f"    {arm}: run.py {' '.join(words)} seed={bench.seed}")
    run_role(arm, [*words, f"seed={bench.seed}", f"run={path}", f"runs_dir={path.parent}"], bench.log(arm))
    return _read(path / "summary.json")


def _evaluate(bench: Bench, arm: str, model: Path | None, name: str) -> dict[str, Any]:
    """Evaluate a model with the settings of an arm's run; None = its newest checkpoint."""
    path, result = bench.path(arm), f"held-out-{name}"
    bench.say(f"    {arm}: evaluation {name} on {bench.tasks} maps")
    words = [f"run={path}", f"eval.checkpoint={model or ''}", f"eval.name={result}"]
    words += [f"eval.tasks={bench.tasks}", "tracking.enabled=false"]
    run_role(f"evaluation {name}", ["role=eval", *words], bench.log(f"{arm}-{result}"))
    return compact(_read(path / "eval" / f"{result}.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkFailed(f"the run left nothing readable at {path}: {error}") from error
    return found


def _entry(
    bench: Bench, arm: str, before: Mapping[str, Any], after: Mapping[str, Any], times: Mapping[str, Any]
) -> dict[str, Any]:
    parts = times["parts_s"]
    return {
        "seed": bench.seed,
        "arm": arm,
        "tasks": bench.tasks,
        "warm_start_s": float(parts.get("warm start", 0.0)),
        "training_s": float(parts["training"]),
        "total_s": float(times["total_s"]),
        **compare(before, after),
    }
