"""Does reinforcement learning learn, and is it the rewards it learns from? The headline experiment.

    python -m benchmarks.controls [--quick] [--seeds 0,1,2] [--only ARM,…] [--tasks N] [-- setting=value …]

For each seed, one after the other: the default training, the same without a learning rate, the same with
shuffled rewards, and the same minutes spent on more supervised steps (see `benchmarks.arms`); each evaluated
on the same held-out maps, sampled and greedy. Each finished arm is kept: started again, an interrupted
benchmark goes on with the next one. The results file is written once all arms of all seeds are there.

The last line is `controls: gain= gain_lr0= gain_shuffled= gain_supervised= greedy_gain=`, means over seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.arms import ARMS, Bench, run_arm
from benchmarks.children import say
from benchmarks.cli import compose, guarded, numbers, split
from benchmarks.gains import mean_gain
from benchmarks.partial import Entries, Partial
from common.errors import require
from common.progress import duration
from common.settings import to_yaml

QUICK = ("learner.steps=20",)
"""Long enough to run everything; what is learnt in it is not what the defaults learn."""
TASKS, QUICK_TASKS = 1000, 200
ISSUE = {"start": 0.55, "gain": 0.25, "null": 0.05, "minutes": 6.0}
"""What was asked for: success at the start at most, gain at least, gain of a null control below, minutes of
warm start and training at most (on two cores)."""


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controls", description=about)
    parser.add_argument("--quick", action="store_true", help="one seed, 200 maps, a short training")
    parser.add_argument("--seeds", type=numbers, help="0,1,2 by default")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"some of {','.join(ARMS)}")
    parser.add_argument("--tasks", type=int, help="held-out maps")
    parser.add_argument("--work", type=Path, help="where the runs go, and what is finished is kept")
    parser.add_argument("--fresh", action="store_true", help="start from the beginning")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.seeds = found.seeds or ([0] if found.quick else [0, 1, 2])
    found.tasks = found.tasks or (QUICK_TASKS if found.quick else TASKS)
    found.work = found.work or Path("runs/benchmarks") / ("controls-quick" if found.quick else "controls")
    for arm in found.only or ():
        require(arm in ARMS, "--only", f"some of {', '.join(ARMS)}", arm)
    return found


def settings_of(words: Sequence[str], tasks: int) -> dict[str, Any]:
    """What must be the same for a finished arm to count: every setting, and the maps."""
    digest = hashlib.sha256(to_yaml(compose(words)).encode()).hexdigest()
    return {"words": list(words), "tasks": tasks, "configuration": digest}


def main(words: list[str]) -> int:
    """Run what is missing, write, print; returns the exit code."""
    own, overrides = split(words)
    args = options(own)
    # Ours first: whoever overrides them means it.
    common = [*(QUICK if args.quick else ()), *overrides]
    partial = Partial.take_up(args.work, settings_of(common, args.tasks), args.fresh, say)
    session = results.begin("controls", words, quick=args.quick)
    run_missing(args, common, partial)
    return report(session, args, partial)


def run_missing(args: argparse.Namespace, words: Sequence[str], partial: Partial) -> None:
    """One arm after the other; whatever is kept already is passed over."""
    arms = [arm for arm in ARMS if arm in (args.only or ARMS)]
    todo = [(seed, arm) for seed in args.seeds for arm in arms]
    for seed, arm in partial.missing(todo, say):
        began = time.monotonic()
        bench = Bench(seed, tuple(words), args.tasks, args.work, say)
        default = partial.get(seed, "default")
        entries = run_arm(bench, arm, default[0] if default else None)
        commit = results.git_state()
        partial.keep(seed, arm, [{**entry, "git": commit} for entry in entries])
        for entry in entries:
            say(f"    {summary(entry)} ({duration(time.monotonic() - began)})")


def summary(entry: Mapping[str, Any]) -> str:
    """`lr0: sampled 0.371 -> 0.371, gain 0.000 [0.000, 0.000]; greedy …`."""
    parts = []
    for mode in ("sampled", "greedy"):
        before, after = (entry[mode][when]["mean"] for when in ("before", "after"))
        parts.append(f"{mode} {before:.3f} -> {after:.3f}, gain {tables.interval(entry[mode]['gain'])}")
    return f"{entry['arm']}: {'; '.join(parts)}"


# --------------------------------------------------------------------------------------------- the report


def report(session: results.Session, args: argparse.Namespace, partial: Partial) -> int:
    """Write the results once all is there; the last line either way."""
    found = [entry for seed in args.seeds for arm in ARMS for entry in partial.get(seed, arm) or ()]
    values = headline(found)
    missing = [f"{seed}/{arm}" for seed in args.seeds for arm in ARMS if partial.get(seed, arm) is None]
    if missing:
        say(f"no results file yet: {', '.join(missing)} are missing; finished arms are kept in {args.work}")
        print(results.headline_line("controls", values), flush=True)
        return 0
    holds = checks(found)
    for check in holds:
        say(f"{'holds' if check['holds'] else 'FAILS'}: {check['asked']}: {check['measured']}")
    kept: Entries = [{k: v for k, v in entry.items() if k != "evaluation_before"} for entry in found]
    line = results.finish(session, values, kept, args.results, checks=holds)
    tables.update_if_committed(args.results)
    partial.remove()
    print(line, flush=True)
    return 0


def headline(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean gains over the seeds, of the arms that were run."""
    values = {
        "gain": mean_gain(runs, "default"),
        "gain_lr0": mean_gain(runs, "lr0"),
        "gain_shuffled": mean_gain(runs, "shuffled"),
        "gain_supervised": mean_gain(runs, "supervised"),
        "greedy_gain": mean_gain(runs, "default", "greedy"),
    }
    return {name: value for name, value in values.items() if value is not None}


def checks(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was asked for, with what was measured, over all seeds."""
    default = [run for run in runs if run["arm"] == "default"]
    starts = [run["own_maps"]["before"] for run in default]
    gains = [run["own_maps"]["after"] - run["own_maps"]["before"] for run in default]
    minutes = [(run["warm_start_s"] + run["training_s"]) / 60 for run in default]
    found = [
        _check(f"success before at most {ISSUE['start']}", max(starts), max(starts) <= ISSUE["start"]),
        _check(f"gain on a run's own maps at least {ISSUE['gain']}", min(gains), min(gains) >= ISSUE["gain"]),
        _check(f"minutes at most {ISSUE['minutes']:g}", max(minutes), max(minutes) <= ISSUE["minutes"]),
    ]
    for arm in ("lr0", "shuffled"):
        for mode in ("sampled", "greedy"):
            worst = max(run[mode]["gain"]["mean"] for run in runs if run["arm"] == arm)
            found.append(_check(f"{arm}: {mode} gain below {ISSUE['null']}", worst, worst < ISSUE["null"]))
    return [*found, *(_wins(runs, mode) for mode in ("sampled", "greedy"))]


def _wins(runs: Sequence[Mapping[str, Any]], mode: str) -> dict[str, Any]:
    """The smallest lead over the better supervised model of the same seed."""
    leads = []
    for run in runs:
        if run["arm"] == "default":
            rivals = [
                other for other in runs if other["seed"] == run["seed"] and "supervised" in other["arm"]
            ]
            best = max(other[mode]["after"]["mean"] for other in rivals)
            leads.append(run[mode]["after"]["mean"] - best)
    return _check(f"{mode}: above the better supervised model", min(leads), min(leads) > 0)


def _check(asked: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"asked": asked, "measured": f"{measured:.3f} in the worst seed", "holds": holds}


if __name__ == "__main__":
    sys.exit(guarded(main))
