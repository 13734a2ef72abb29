"""The comparison of `benchmarks.allocation` on FrozenLake: real actors, real sockets, a real policy.

    python -m benchmarks.allocation_frozenlake [--quick] [--seeds 0,1,2] [--policies warm,trained]
                                               [--model FOLDER] [--waves N] [-- setting=value …]

Each arm is a run of the ring in which the policy stands still (`benchmarks.lake_ring`): the allocator and its
actors are those of `run.py`, the learner only listens. Two policies, both of one default training: `warm`,
where it starts from, and `trained`, its last checkpoint. Runs of one seed meet the same tasks; the first
waves, in which the success predictor learns, do not count. Measures as in `benchmarks.allocation`.

**Equal tokens.** `flat` and `random` are run with twice the continuations of the other arms, and known from
that at any smaller number (`benchmarks.subsample`). Every arm is set beside flat and random at its own mean
tokens per prompt, and beside flat at its own mean number of leaves.

**Null control.** `noise` answers at random (`benchmarks.noisy_allocator`): no lift over `random` may come of
it.

The last line is `allocation_frozenlake: contrast_lift= mixed_gain_points= noise_lift=`: of the policy that
was measured last, at equal tokens, trace × trace_roots over flat, uucb × adaptive less flat in points, and
the same as the first with noise over random, less one.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.allocation_report import METRICS, gain_of, lift_of, mean_of
from benchmarks.children import run_role, say
from benchmarks.cli import compose, fresh_run, guarded, numbers, split
from benchmarks.contrast import Sums, add, measure
from benchmarks.lake_ring import Ring, grow
from benchmarks.partial import Partial
from benchmarks.results import BenchmarkFailed
from benchmarks.subsample import at, flat_curve, random_curve
from common.errors import require
from common.nouns import Tree
from common.progress import duration
from common.rundir import RunDir
from common.settings import to_yaml

SIZE = 6
"""Continuations of a prompt, the ring's default: 2 + 4 of Tree-GRPO's and TRACE's, 3 + 3 of ARPO's."""
MOST = 2 * SIZE
CHAINS, EXPANSIONS = MOST // 3, 2
WAVES, QUICK_WAVES, BATCH = 24, 10, 16
BURN_IN = 0.25
"""Share of the waves that does not count."""
COMMON = (
    "tracking=none", f"learner.batch_trees={BATCH}", "engine.features=16", "allocator.max_score_staleness=0",
)  # fmt: skip
PREDICTS = "allocator/predictor=shared"
ARMS: dict[str, tuple[str, ...]] = {
    "flat": ("allocator/rule=flat", f"allocator.budget.continuations={MOST}"),
    "random": (
        "allocator/rule=random", f"allocator.rule.chains={CHAINS}", f"allocator.rule.expansions={EXPANSIONS}",
        f"allocator.budget.continuations={MOST}",
    ),
    "arpo": ("allocator/rule=entropy", f"allocator.rule.initial={SIZE // 2}"),
    "at2po": ("allocator/rule=at2po", "allocator.rule.initial=3", "allocator.rule.beam=2"),
    "uucb": ("allocator/rule=uucb", PREDICTS),
    "uucb × adaptive": ("allocator/rule=uucb", "allocator/budget=adaptive", PREDICTS),
    "trace": ("allocator/rule=trace", PREDICTS),
    "trace × trace_roots": (
        "allocator/rule=trace", "allocator/budget=trace_roots", "allocator.budget.candidates=4", PREDICTS,
    ),
    "patr": ("allocator/rule=patr", "allocator.budget.continuations=4"),
    "igrpo": ("allocator/rule=igrpo", "allocator.budget.continuations=5"),
    "trace, noise": ("allocator/rule=trace",),
    "trace × trace_roots, noise": (
        "allocator/rule=trace", "allocator/budget=trace_roots", "allocator.budget.candidates=4",
    ),
    "uucb, noise": ("allocator/rule=uucb",),
}  # fmt: skip
"""Arm -> its settings; those called noise have their predictor replaced."""
QUICK_ARMS = ("flat", "random", "trace × trace_roots", "trace × trace_roots, noise")


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocation_frozenlake", description=about)
    parser.add_argument("--quick", action="store_true", help="one policy, two seeds, few arms, short runs")
    parser.add_argument("--seeds", type=numbers, help="0,1,2 by default")
    parser.add_argument("--policies", type=lambda text: text.split(","), help="some of warm,trained")
    parser.add_argument("--model", type=Path, help="folder of a model to be measured instead")
    parser.add_argument("--only", type=lambda text: text.split(";"), help="some arms, parted by ;")
    parser.add_argument("--waves", type=int, help=f"waves of {BATCH} prompts in each run")
    parser.add_argument("--work", type=Path, help="where the runs go, and what is finished is kept")
    parser.add_argument("--fresh", action="store_true", help="start from the beginning")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.seeds = found.seeds or ([0, 1] if found.quick else [0, 1, 2])
    found.policies = found.policies or (["warm"] if found.quick else ["warm", "trained"])
    found.only = found.only or (QUICK_ARMS if found.quick else list(ARMS))
    found.waves = found.waves or (QUICK_WAVES if found.quick else WAVES)
    found.work = found.work or Path("runs/benchmarks") / f"allocation-lake{'-quick' if found.quick else ''}"
    require(len(found.seeds) > 1, "--seeds", "at least two, for a standard error", found.seeds)
    require(found.waves >= 4, "--waves", "at least 4", found.waves)
    for name, known in ((found.policies, ("warm", "trained")), (found.only, ARMS)):
        for each in name:
            require(each in known, "--policies and --only", f"some of {', '.join(known)}", each)
    return found


def main(words: list[str]) -> int:
    """Run what is missing, write, print; returns the exit code."""
    own, overrides = split(words)
    args = options(own)
    session = results.begin("allocation_frozenlake", words, module="allocation_frozenlake", quick=args.quick)
    partial = Partial.take_up(args.work, settings_of(args, overrides), args.fresh, say)
    models = {"given": args.model} if args.model else policies(args, overrides)
    arms = dict.fromkeys(["flat", "random", *args.only])
    every = product(models, args.seeds, arms)
    todo = {(seed, f"{policy}/{arm}"): (policy, arm) for policy, seed, arm in every}
    for seed, name in partial.missing(list(todo), say):
        policy, arm = todo[seed, name]
        entry = measure_arm(args, overrides, policy, models[policy], seed, arm)
        partial.keep(seed, name, [{**entry, "git": results.git_state()}])
    line = report(session, args, partial, list(models))
    partial.remove()
    print(line, flush=True)
    return 0


def settings_of(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """What must be the same for a finished arm to count."""
    digest = hashlib.sha256(to_yaml(compose([*COMMON, *overrides])).encode()).hexdigest()
    return {"waves": args.waves, "size": SIZE, "model": str(args.model or ""), "configuration": digest}


# --------------------------------------------------------------------------------------------- the runs


def policies(args: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Path]:
    """The folders of the policies that are to be measured, made where they are missing."""
    path = (args.work / "policy").absolute()
    trained = "trained" in args.policies
    if not (path / "run.json").is_file() or (trained and not (path / "summary.json").is_file()):
        role = "local" if trained else "warmstart"
        fresh_run(path)
        say(f"the policy: run.py role={role}")
        words = ["tracking=none", *overrides, f"role={role}", f"run={path}", "eval.tasks=1"]
        took = run_role(role, words, path.with_suffix(".out"))
        say(f"    made in {duration(took)}")
    run = RunDir.open(path)
    found = {"warm": run.warmstart_model}
    if trained:
        found["trained"] = newest_checkpoint(run.checkpoints)
    return {name: found[name] for name in args.policies}


def newest_checkpoint(folder: Path) -> Path:
    """The last checkpoint of a training.

    Raises:
        BenchmarkFailed: there is none.
    """
    found = sorted(folder.glob("step-*"))
    if not found:
        raise BenchmarkFailed(f"the training left no checkpoint in {folder}; start again with --fresh")
    return found[-1]


def measure_arm(
    args: argparse.Namespace, overrides: Sequence[str], policy: str, model: Path, seed: int, arm: str
) -> dict[str, Any]:
    """One run; what is kept of it."""
    words = (
        *COMMON, f"allocator.budget.continuations={SIZE}", *overrides, *ARMS[arm], f"seed={seed}",
        f"learner.steps={args.waves}", f"learner.max_policy_lag={args.waves}", f"model.path={model}",
    )  # fmt: skip
    path = args.work.absolute() / f"{policy}-{seed}-{slug(arm)}"
    began = time.monotonic()
    trees = grow(Ring(path, model, words, noisy=arm.endswith("noise")))
    counted = [tree for tree in trees if tree.wave >= BURN_IN * args.waves]
    sums = add(measure(tree) for tree in counted)
    seconds = time.monotonic() - began
    say(
        f"{policy}, seed {seed}, {arm}: contrast {sums.ratios()['contrast']:.3f}, "
        f"{sums.ratios()['tokens']:.0f} tokens per prompt ({duration(seconds)})"
    )
    entry: dict[str, Any] = {"policy": policy, "seed": seed, "arm": arm, "seconds": seconds}
    return {**entry, "sums": sums.to_json(), "curve": [each.to_json() for each in curve(arm, counted)]}


def slug(arm: str) -> str:
    """A name for a folder."""
    return arm.replace(" × ", "-").replace(", ", "-")


def curve(arm: str, trees: Sequence[Tree]) -> list[Sums]:
    """Of a baseline; empty for other arms."""
    if arm == "flat":
        return flat_curve(trees, MOST)
    return random_curve(trees, CHAINS, EXPANSIONS) if arm == "random" else []


# --------------------------------------------------------------------------------------------- the report


def report(
    session: results.Session, args: argparse.Namespace, partial: Partial, measured: Sequence[str]
) -> str:
    """Write the results file, and the docs' tables where it is the committed one; returns the last line."""
    entries = {
        (policy, arm): [kept[0] for seed in args.seeds if (kept := partial.get(seed, f"{policy}/{arm}"))]
        for policy in measured
        for arm in dict.fromkeys(["flat", "random", *args.only])
    }
    rows = [row(entries, policy, arm) for policy, arm in entries]
    runs = [entry for kept in entries.values() for entry in kept]
    line = results.finish(session, headline(rows, measured[-1]), runs, args.results, rows=rows)
    tables.update_if_committed(args.results)
    return line


def row(
    entries: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], policy: str, arm: str
) -> dict[str, Any]:
    """An arm beside flat and random at its own tokens, and beside flat at its own leaves, seed by seed.

    A baseline is reported at the size of the others. Beside one that has not so many tokens, even with all
    it was run with, nothing is said.
    """
    curves = {
        name: [[Sums(**each) for each in entry["curve"]] for entry in entries[policy, name]]
        for name in ("flat", "random")
    }
    if arm in curves:
        sums = known(at(of_seed, "leaves", SIZE) for of_seed in curves[arm])
    else:
        sums = [Sums(**entry["sums"]) for entry in entries[policy, arm]]
    found: dict[str, Any] = {"policy": policy, "arm": arm}
    for name in ("tokens", "leaves", "success", *METRICS):
        found[name] = mean_of([each.ratios()[name] for each in sums])
    for base, unit in (("flat", "tokens"), ("flat", "leaves"), ("random", "tokens")):
        beside = known(
            at(of_seed, unit, each.ratios()[unit]) for of_seed, each in zip(curves[base], sums, strict=True)
        )
        for name in METRICS if beside else ():
            mine, theirs = ([each.ratios()[name] for each in of] for of in (sums, beside))
            found[f"{name}_over_{base}_{unit}"] = lift_of(mine, theirs)
            found[f"{name}_gain_{base}_{unit}"] = gain_of(mine, theirs)
    return found


def known(sums: Iterable[Sums | None]) -> list[Sums]:
    """All of them; none where one is missing."""
    found = list(sums)
    return [each for each in found if each is not None] if None not in found else []


def headline(rows: Sequence[Mapping[str, Any]], policy: str) -> dict[str, float]:
    """See the module docstring; what was not measured is left out."""
    found = {each["arm"]: each for each in rows if each["policy"] == policy}
    values: dict[str, float] = {}
    if "trace × trace_roots" in found:
        values["contrast_lift"] = found["trace × trace_roots"]["contrast_over_flat_tokens"][0]
    if "uucb × adaptive" in found:
        values["mixed_gain_points"] = 100 * found["uucb × adaptive"]["mixed_gain_flat_tokens"][0]
    noise = found.get("trace × trace_roots, noise")
    if noise is not None:
        values["noise_lift"] = noise["contrast_over_random_tokens"][0] - 1
    return values


if __name__ == "__main__":
    sys.exit(guarded(main))
