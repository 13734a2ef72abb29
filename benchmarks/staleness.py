"""What old data cost, and what correcting for their age is worth: FrozenLake at lag 0, 4 and 16.

    python -m benchmarks.staleness [--quick] [--seeds 0,1,…] [--only ARM,…] [--tokens N] [-- setting=value …]

For each seed, from one warm start and over the same tasks: trainings on equal sampled tokens whose data are
really that old (`benchmarks.stale_training`: every batch is sampled under the weights of `lag` updates
before; the lag histogram is in the results), each evaluated on the same held-out maps, sampled and greedy.

    lag0, lag4, lag16              the default correction: loss=ppo, weight=none, whose ratio is π/μ
    lag4-…, lag16-uncorrected      loss=reinforce, weight=none: no ratio, no clip, as if data were fresh
    lag4-…, lag16-decoupled        loss=ppo, weight=decoupled; the results file does not wait for these
    null                           lag 0 with the default correction and other draws: what luck alone does

Seeds differ by more than what is looked for: lag0, lag4 and null, which the target speaks of, are run over
all of them, the other arms over the first five.

A gap is success of `lag0` less success of an arm, paired by seed; its bound is the one-sided 90 % limit of
Student's t over the seeds. The last line is `staleness: gap_lag4= gap_lag16= gap_lag16_uncorrected=`, in
success of sampled actions. The uncorrected arms are compared with the corrected one at lag 0 as well: what
one loses by not correcting.

Each finished arm is kept: started again, an interrupted benchmark goes on with the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.children import run_role, say
from benchmarks.cli import compose, fresh_run, guarded, numbers, split
from benchmarks.gains import MODES, compact
from benchmarks.partial import Entries, Partial
from common.errors import require
from common.progress import duration
from common.settings import to_yaml

LAGS = (0, 4, 16)
CORRECTED = ("learner/loss=ppo", "learner/weight=none")
"""The default correction, what the configuration says where nothing is chosen: the clipped ratio π/μ, which
stops tokens that have moved far from what sampled them."""
DECOUPLED = ("learner/loss=ppo", "learner/weight=decoupled")
UNCORRECTED = ("learner/loss=reinforce", "learner/weight=none")
NULL_SEED = 1 << 40
"""Added to a seed for the draws of the null control."""
TOKENS, QUICK_TOKENS = 60_000, 40_000
"""Action tokens that a training samples."""
TASKS, QUICK_TASKS = 1000, 200
ISSUE = {"gap": 0.05, "bound": 0.12}
"""What was asked for of the default correction at lag 4: gap at most, its upper bound at most."""
T_90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383)
T_95_BOTH = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Quantiles of Student's t with 1, 2, … degrees of freedom: 90 %, and both sides of a 95 % interval."""
SEEDS, FEW_SEEDS = 10, 5
OVER_ALL_SEEDS = ("lag0", "lag4", "null")

Settings = tuple[int, tuple[str, ...], int]
ARMS: Mapping[str, Settings] = {
    **{f"lag{lag}": (lag, CORRECTED, 0) for lag in LAGS},
    **{f"lag{lag}-uncorrected": (lag, UNCORRECTED, 0) for lag in LAGS[1:]},
    "null": (0, CORRECTED, NULL_SEED),
    **{f"lag{lag}-decoupled": (lag, DECOUPLED, 0) for lag in LAGS[1:]},
}
"""Arm -> lag, settings, and what is added to the seed of its draws."""


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=about)
    parser.add_argument("--quick", action="store_true", help="one seed, 200 maps, fewer tokens")
    parser.add_argument("--seeds", type=numbers, help="0 to 9 by default")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--tasks", type=int, help="held-out maps")
    parser.add_argument("--tokens", type=int, help="action tokens that each training samples")
    parser.add_argument("--work", type=Path, help="where the trainings go, and what is finished is kept")
    parser.add_argument("--fresh", action="store_true", help="start from the beginning")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.seeds = found.seeds or ([0] if found.quick else list(range(SEEDS)))
    found.tasks = found.tasks or (QUICK_TASKS if found.quick else TASKS)
    found.tokens = found.tokens or (QUICK_TOKENS if found.quick else TOKENS)
    found.work = found.work or Path("runs/benchmarks") / ("staleness-quick" if found.quick else "staleness")
    for arm in found.only or ():
        require(arm in ARMS, "--only", f"some of {', '.join(ARMS)}", arm)
    return found


def words_of(arm: str, seed: int, args: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """The settings of an arm; overrides come last: whoever gives them means it."""
    lag, correction, _ = ARMS[arm]
    own = [f"learner.max_policy_lag={lag}", *correction, f"eval.tasks={args.tasks}", "tracking.enabled=false"]
    return [f"seed={seed}", *own, *overrides]


def main(words: list[str]) -> int:
    """Run what is missing, write, print; returns the exit code."""
    own, overrides = split(words)
    args = options(own)
    made = [compose(words_of(arm, 0, args, overrides)) for arm in ("lag16", "lag16-uncorrected")]
    digest = hashlib.sha256("".join([repr(ARMS), *map(to_yaml, made)]).encode()).hexdigest()
    settings = {"words": list(overrides), "tasks": args.tasks, "tokens": args.tokens, "configuration": digest}
    partial = Partial.take_up(args.work, settings, args.fresh, say)
    session = results.begin("staleness", words, quick=args.quick)
    run_missing(args, overrides, partial)
    return report(session, args, partial)


# ----------------------------------------------------------------------------------------------- the arms


def run_missing(args: argparse.Namespace, overrides: Sequence[str], partial: Partial) -> None:
    """One arm after the other; whatever is kept already is passed over."""
    # Arm by arm: an interrupted benchmark has all seeds of the first arms.
    todo = [(seed, arm) for arm in ARMS if arm in (args.only or ARMS) for seed in seeds_of(arm, args.seeds)]
    for seed, arm in partial.missing(todo, say):
        entry = measure(arm, seed, args, overrides)
        partial.keep(seed, arm, [{**entry, "git": results.git_state()}])
        rates = ", ".join(f"{mode} {tables.interval(entry['after'][mode])}" for mode in MODES)
        say(f"    {rates}; {entry['tokens']} tokens, ages {entry['lags']} ({duration(entry['seconds'])})")


def seeds_of(arm: str, seeds: Sequence[int]) -> Sequence[int]:
    """Those that an arm is run with."""
    return seeds if arm in OVER_ALL_SEEDS else seeds[:FEW_SEEDS]


def warm_start(seed: int, args: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """The weights that all arms of a seed start from; made once."""
    work: Path = args.work
    path = (work / f"seed-{seed}-start").absolute()
    model = path / "warmstart" / "model"
    if not (model / "tokenizer.json").is_file():
        words = ["role=warmstart", *overrides, f"seed={seed}", f"run={fresh_run(path)}"]
        run_role("warm start", [*words, "tracking.enabled=false"], path.with_suffix(".out"))
    return model


def measure(arm: str, seed: int, args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """Train and evaluate one arm, in this process."""
    from actors.evaluate import evaluate
    from benchmarks.stale_training import StaleTraining

    lag, _, other = ARMS[arm]
    start, config = warm_start(seed, args, overrides), compose(words_of(arm, seed, args, overrides))
    scratch, began, spent = (
        (args.work / f"seed-{seed}-{arm}").absolute(),
        time.monotonic(),
        time.process_time(),
    )
    shutil.rmtree(scratch, ignore_errors=True)
    training = StaleTraining(config, start, scratch, lag, seed + other)
    folder, course = training.run(args.tokens), training.course
    trained_s, cpu_s = time.monotonic() - began, time.process_time() - spent
    plain = {mode: evaluate(config, folder, greedy=mode == "greedy").to_plain() for mode in MODES}
    shutil.rmtree(scratch)
    return {
        "seed": seed, "arm": arm, "lag": lag, "updates": course.updates, "tokens": course.tokens,
        "lags": {str(age): count for age, count in sorted(course.ages.items())},
        "after": compact(plain), "steps": course.steps, "training_s": trained_s, "training_cpu_s": cpu_s,
        "seconds": time.monotonic() - began,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------- the report


def report(session: results.Session, args: argparse.Namespace, partial: Partial) -> int:
    """Write the results once all is there; the last line either way."""
    found: Entries = [entry for seed in args.seeds for arm in ARMS for entry in partial.get(seed, arm) or ()]
    compared = {f"{arm}/{mode}": gap(found, arm, mode) for arm in ARMS if arm != "lag0" for mode in MODES}
    values = headline(compared)
    needed = [arm for arm in ARMS if not arm.endswith("decoupled")]
    wanted = [(seed, arm) for arm in needed for seed in seeds_of(arm, args.seeds)]
    missing = [f"{seed}/{arm}" for seed, arm in wanted if partial.get(seed, arm) is None]
    if missing:
        say(f"no results file yet: {', '.join(missing)} are missing; finished arms are kept in {args.work}")
        print(results.headline_line("staleness", values), flush=True)
        return 0
    holds = checks(compared["lag4/sampled"]) + no_effect(compared["null/sampled"])
    for check in holds:
        say(f"{'holds' if check['holds'] else 'FAILS'}: {check['asked']}: {check['measured']}")
    line = results.finish(session, values, found, args.results, gaps=compared, checks=holds)
    tables.update_if_committed(args.results)
    partial.remove()
    print(line, flush=True)
    return 0


def headline(compared: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean gaps, of the arms that were run."""
    arms = {"gap_lag4": "lag4", "gap_lag16": "lag16", "gap_lag16_uncorrected": "lag16-uncorrected"}
    found = {name: compared[f"{arm}/sampled"] for name, arm in arms.items()}
    return {name: gap["mean"] for name, gap in found.items() if gap}


def gap(runs: Sequence[Mapping[str, Any]], arm: str, mode: str) -> dict[str, float]:
    """Success of `lag0` less that of an arm, paired by seed: `mean`, `seeds` and, of two seeds or more,
    `bound` (90 %) and `half` (of a 95 % interval); empty where no seed has both."""
    success = {(run["seed"], run["arm"]): float(run["after"][mode]["mean"]) for run in runs}
    seeds = sorted(seed for seed, name in success if name == "lag0" and (seed, arm) in success)
    found = [success[seed, "lag0"] - success[seed, arm] for seed in seeds]
    if not found:
        return {}
    mean = statistics.fmean(found)
    if len(found) == 1:
        return {"mean": mean, "seeds": 1}
    error = statistics.stdev(found) / math.sqrt(len(found))
    place = min(len(found) - 2, len(T_90) - 1)
    return {
        "mean": mean, "bound": mean + T_90[place] * error, "half": T_95_BOTH[place] * error,
        "seeds": len(found),
    }  # fmt: skip


def checks(found: Mapping[str, float]) -> list[dict[str, Any]]:
    """What was asked for of lag 4, with what was measured; bounds need two seeds."""
    asked = [("gap", "mean", ISSUE["gap"])]
    if "bound" in found:
        asked.append(("90 % bound of the gap", "bound", ISSUE["bound"]))
    return [
        {
            "asked": f"lag4: {what} at most {most}",
            "measured": f"{found[key]:.3f}",
            "holds": found[key] <= most,
        }
        for what, key, most in asked
    ]


def no_effect(found: Mapping[str, float]) -> list[dict[str, Any]]:
    """Whether the control shows none; one seed says nothing of it."""
    if "half" not in found:
        return []
    interval = f"{found['mean']:.3f} ± {found['half']:.3f} over {found['seeds']} seeds"
    holds = abs(found["mean"]) <= found["half"]
    return [{"asked": "null: 0 within the 95 % interval", "measured": interval, "holds": holds}]


if __name__ == "__main__":
    sys.exit(guarded(main))
