"""How far apart two runs with the same seed drift, where nothing forces them together.

    python -m benchmarks.drift [--quick] [--repeats N] [--seed S] [--steps N] [-- setting=value …]

A seed fixes draws, not tokens: floating point depends on which rows share a forward pass, and batches depend
on the order in which trees arrive. From one warm start this trains several times under one seed and compares,
after every update, the success of its batch and the weights. Two controls give the scale:

    other-seed      the same with another seed: how far runs drift that share nothing but their start
    deterministic   two short runs with deterministic=true: they must not differ in a single bit

The last line is `drift: success= weights= apart= apart_other_seed= deterministic=`.

    success         mean over updates of |difference of the batches' success|
    weights         |a − b| / |a| of all weights after the last update (L2 norms)
    apart           |a − b| / (distance that the two have moved from the start, their mean): 0 = together
    deterministic   weights of which any bit differs between the two deterministic runs
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from benchmarks import results, tables
from benchmarks.children import run_role, say
from benchmarks.cli import compose, fresh_run, guarded, split
from benchmarks.ring_figures import mean
from common.errors import require
from common.rundir import RunDir

STEPS, QUICK_STEPS = 12, 4
REPEATS, QUICK_REPEATS = 3, 2
EXACT_STEPS = 2
"""Updates of the deterministic runs: one sequence at a time takes its time, and a bit that differs stays."""
EXACT = ("deterministic=true", "learner.max_policy_lag=0", "allocator.max_score_staleness=0")

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Course:
    """What one run left, update by update."""

    name: str
    success: list[float]
    """[steps] of the batch of each update."""
    weights: list[Vector]
    """[steps + 1] all weights as one vector, those of the start first."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far two runs are apart after each update, [steps] each; see the module docstring."""

    success: list[float]
    weights: list[float]
    apart: list[float]


def drift(a: Course, b: Course) -> Drift:
    """Compare two runs that began with the same weights.

    Raises:
        BenchmarkFailed: they did not, or one of them is shorter.
    """
    if len(a.weights) != len(b.weights) or not np.array_equal(a.weights[0], b.weights[0]):
        raise results.BenchmarkFailed(
            f"{a.name} and {b.name} cannot be compared: they began with different weights, or one is shorter"
        )
    start, pairs = a.weights[0], list(zip(a.weights[1:], b.weights[1:], strict=True))
    gaps = [_norm(left - right) for left, right in pairs]
    moved = [(_norm(left - start) + _norm(right - start)) / 2 for left, right in pairs]
    return Drift(
        success=[abs(x - y) for x, y in zip(a.success, b.success, strict=True)],
        weights=[gap / _norm(left) for gap, (left, _) in zip(gaps, pairs, strict=True)],
        apart=[gap / way if way > 0 else 0.0 for gap, way in zip(gaps, moved, strict=True)],
    )


def differing(a: Course, b: Course) -> int:
    """How many weights differ in any bit, over all updates."""
    pairs = zip(a.weights, b.weights, strict=True)
    return sum(int(np.count_nonzero(left != right)) for left, right in pairs)


def _norm(vector: Vector) -> float:
    return float(np.sqrt(np.dot(vector, vector)))


# ---------------------------------------------------------------------------------------------------- runs


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=about)
    parser.add_argument("--quick", action="store_true", help="two short runs and the controls")
    parser.add_argument("--repeats", type=int, help="runs under the same seed, at least 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates of each run")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/drift"), help="where the runs go")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.repeats = found.repeats or (QUICK_REPEATS if found.quick else REPEATS)
    found.steps = found.steps or (QUICK_STEPS if found.quick else STEPS)
    require(found.repeats >= 2, "--repeats", "at least 2", found.repeats)
    return found


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Name of each run -> its settings, in the order they are run."""

    def words(seed: int, steps: int, *more: str) -> list[str]:
        every = ["learner.checkpoint_every=1", f"learner.keep_checkpoints={steps + 1}"]
        return [*overrides, f"seed={seed}", f"learner.steps={steps}", *every, "eval.tasks=1", *more]

    same = {f"repeat-{number}": words(args.seed, args.steps) for number in range(args.repeats)}
    exact = {f"deterministic-{number}": words(args.seed, EXACT_STEPS, *EXACT) for number in range(2)}
    return {**same, "other-seed": words(args.seed + 1, args.steps), **exact}


def measure(name: str, words: Sequence[str], start: Path, work: Path) -> Course:
    """Train once from `start`, and read what it left."""
    path = fresh_run(work.absolute() / name)
    settings = [*words, f"model.path={start}", f"run={path}", f"runs_dir={path.parent}"]
    run_role(name, settings, path.with_suffix(".out"))
    return read_course(name, RunDir.open(path))


def read_course(name: str, rundir: RunDir) -> Course:
    """Weights from the checkpoints, success from the learner's log."""
    lines = rundir.log_file("learner").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    success = [float(event["success"]) for event in events if event["event"] == "progress"]
    folders = sorted(rundir.checkpoints.glob("step-*"))
    weights = [_vector(load_file(folder / "model.safetensors")) for folder in folders]
    if len(weights) != len(success) + 1:
        raise results.BenchmarkFailed(
            f"{rundir.path} has {len(weights)} checkpoints for {len(success)} updates; expected one more"
        )
    return Course(name, success, weights)


def _vector(tensors: Mapping[str, Any]) -> Vector:
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in sorted(tensors)])


def warm_start(args: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """The weights that all runs begin with; the folder of their model."""
    path = fresh_run(args.work.absolute() / "start")
    words = ["role=warmstart", *overrides, f"seed={args.seed}", f"run={path}", "tracking.enabled=false"]
    run_role("start", words, path.with_suffix(".out"))
    return RunDir.open(path).warmstart_model


# ------------------------------------------------------------------------------------------------ the report


def main(words: list[str]) -> int:
    """Measure, write, print; returns the exit code."""
    own, overrides = split(words)
    args = options(own)
    runs = plan(args, overrides)
    for settings in runs.values():
        compose(settings)
    session = results.begin("drift", words, quick=args.quick)
    say("[0] warm start")
    start, courses = warm_start(args, overrides), dict[str, Course]()
    for number, (name, settings) in enumerate(runs.items(), start=1):
        say(f"[{number}/{len(runs)}] {name}: run.py {' '.join(settings)}")
        courses[name] = measure(name, settings, start, args.work)
    print(report(session, courses, args.results), flush=True)
    return 0


def report(session: results.Session, courses: Mapping[str, Course], folder: Path) -> str:
    """Write the results file, and the docs' tables where it is the committed one; returns the last line."""
    repeats = [course for name, course in courses.items() if name.startswith("repeat-")]
    exact = [course for name, course in courses.items() if name.startswith("deterministic-")]
    pairs = {f"{a.name}, {b.name}": drift(a, b) for a, b in combinations(repeats, 2)}
    others = {f"{a.name}, other-seed": drift(a, courses["other-seed"]) for a in repeats}
    alike = {"deterministic-0, deterministic-1": drift(*exact)}
    headline = {
        "success": mean([mean(pair.success) for pair in pairs.values()]),
        "weights": mean([pair.weights[-1] for pair in pairs.values()]),
        "apart": mean([pair.apart[-1] for pair in pairs.values()]),
        "apart_other_seed": mean([pair.apart[-1] for pair in others.values()]),
        "deterministic": differing(*exact),
    }
    found = [
        {"pair": name, "success": pair.success, "weights": pair.weights, "apart": pair.apart}
        for name, pair in {**pairs, **others, **alike}.items()
    ]
    success = {name: course.success for name, course in courses.items()}
    line = results.finish(session, headline, found, folder, success=success)
    tables.update_if_committed(folder)
    return line


if __name__ == "__main__":
    sys.exit(guarded(main))
