"""How fast the ring turns, who waits for whom, and what goes over the wire.

    python -m benchmarks.ring [--quick] [--repeats N] [--seed S] [--steps N] [-- setting=value …]

Runs `run.py` with role=local, reads the journals of its processes, writes `results/ring.json`. Two controls:

    null           the same run again, under the same seed: how far its figures differ is their noise
    sensitivity    the same run with learner.max_policy_lag=0, where actors must wait for every update: their
                   share of waiting has to rise, or the figure does not measure waiting

The last line is `ring: rollout_tokens_per_s= learner_tokens_per_s= actor_wait= learner_wait=
wire_bytes_per_token=`, means over the repeats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.accounts import read_accounts
from benchmarks.children import run_role, say
from benchmarks.cli import compose, fresh_run, guarded, split
from benchmarks.ring_figures import HEADLINE, figures, mean, spread

STEPS, QUICK_STEPS = 60, 15
"""Updates of one run: enough that the stretch between the first and the last is a steady one."""
REPEATS, QUICK_REPEATS = 3, 2
SHORT_S = 10.0
"""The allocator writes its totals every two seconds: a shorter stretch is measured roughly."""
SYNCHRONOUS = "learner.max_policy_lag=0"


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ring", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="short runs, two repeats, no sensitivity control"
    )
    parser.add_argument("--repeats", type=int, help="runs under the same seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="updates of each run")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/ring"), help="where the runs go")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.repeats = found.repeats or (QUICK_REPEATS if found.quick else REPEATS)
    found.steps = found.steps or (QUICK_STEPS if found.quick else STEPS)
    return found


def plan(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, list[str]]:
    """Name of each run -> its settings, in the order they are run."""
    common = [*overrides, f"seed={args.seed}", f"learner.steps={args.steps}", "eval.tasks=1"]
    runs = {f"repeat-{number}": common for number in range(args.repeats)}
    if not args.quick:
        runs["synchronous"] = [*common, SYNCHRONOUS]
    return runs


def measure(name: str, words: Sequence[str], work: Path) -> dict[str, Any]:
    """Run once, and read what it left."""
    path = fresh_run(work.absolute() / name)
    seconds = run_role(name, [*words, f"run={path}", f"runs_dir={path.parent}"], path.with_suffix(".out"))
    found = figures(read_accounts(path))
    say("    " + results.headline_line(name, {key: found[key] for key in HEADLINE}))
    return {"run": name, "settings": list(words), "seconds": seconds, **found}


def null_control(repeats: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Noise of each headline figure; empty where one run says nothing about it."""
    return {name: spread(repeats, name) for name in HEADLINE} if len(repeats) > 1 else {}


def sensitivity_control(headline: Mapping[str, float], found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Waiting of the actors with and without slack; empty where the control was not run."""
    runs = [run for run in found if run["run"] == "synchronous"]
    if not runs:
        return {}
    before, after = headline["actor_wait"], float(runs[0]["actor_wait"])
    return {"actor_wait": before, "actor_wait_synchronous": after, "rises": after > before}


def main(words: list[str]) -> int:
    """Measure, write, print; returns the exit code."""
    own, overrides = split(words)
    args = options(own)
    runs = plan(args, overrides)
    for settings in runs.values():
        compose(settings)
    session = results.begin("ring", words, quick=args.quick)
    found = []
    for number, (name, settings) in enumerate(runs.items(), start=1):
        say(f"[{number}/{len(runs)}] {name}: run.py {' '.join(settings)}")
        found.append(measure(name, settings, args.work))
    line = report(session, found, args.results)
    print(line, flush=True)
    return 0


def report(session: results.Session, found: Sequence[dict[str, Any]], folder: Path) -> str:
    """Write the results file, and the docs' tables where it is the committed one; returns the last line."""
    repeats = [run for run in found if run["run"].startswith("repeat-")]
    headline = {name: mean([run[name] for run in repeats]) for name in HEADLINE}
    noise, sensitivity = null_control(repeats), sensitivity_control(headline, found)
    for name, value in noise.items():
        say(f"noise of {name}: {100 * value:.1f} % between {len(repeats)} runs under the same seed")
    if sensitivity:
        waits = f"{sensitivity['actor_wait']:.3f} -> {sensitivity['actor_wait_synchronous']:.3f}"
        verdict = "rises, as it must" if sensitivity["rises"] else "DOES NOT RISE: it measures no waiting"
        say(f"sensitivity: with {SYNCHRONOUS} actor_wait goes {waits}: it {verdict}")
    shortest = min(run["window_s"] for run in found)
    if shortest < SHORT_S:
        say(f"the steady part of a run is only {shortest:.1f} s long: these figures are rough, use --steps")
    line = results.finish(session, headline, found, folder, noise=noise, sensitivity=sensitivity)
    tables.update_if_committed(folder)
    return line


if __name__ == "__main__":
    sys.exit(guarded(main))
