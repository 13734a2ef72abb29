"""How much contrast does each rule, budget and predictor find, at equal continuations and at equal tokens?

    python -m benchmarks.allocation [--quick] [--seeds N] [--waves N] [--only A,B,…] [--fresh]

The allocator's own rules, budgets, predictors and forest grow trees over populations of prompts whose hidden
success probabilities move as a martingale (`benchmarks.population`), frozen so that flat sampling has the
papers' own flat rates: A 26.8 %, B 34.7 % (TRACE, arXiv 2606.11119), C 58.1 % (InfoTree, arXiv 2605.05262).
Nothing trains: the policy stands still. Prompts never repeat; all arms of a seed meet the same ones. A
predictor that learns starts with what some waves of flat sampling taught it, and goes on learning.

Parts (`--only`: the populations A, B, C, then `variants` of them and the `grid` of weights) are kept as they
finish, for the same commit and lengths, and may be measured by several processes; the run that finds all of
them writes the results.

**Measures** (`benchmarks.contrast` defines the sums):

    mixed            share of prompts with both outcomes; the second definition of RIFB, P(0 < k < G)
    contrast         effective contrast ratio: share of sampled continuations whose prompt has both outcomes.
                     Under flat sampling with a fixed budget it equals `mixed`. TRACE's definition is not
                     public beyond its name; this one is the share of a batch that is not wasted
    rifb             the first definition, E[2 √(p̂ (1 − p̂))], the mean |advantage| of a z-scored group
    anchor_contrast  share of anchors where outcomes meet (fresh continuations and the owner) that have both
    lift             ratio over `flat × fixed` of the population's group size: over its rate as it is known
                     exactly, with flat's luck in the same seeds as a control variate (`…_exact`, in headline
                     and checks), and over the same seeds' flat run, paired

**Equal.** *Continuations*: as many leaves per prompt as flat's group, where `adaptive` may exceed it by its
published 5 %. *Tokens*: as many sampled tokens per prompt; continuations from late prefixes are cheaper, so
rules that branch late get more of them. Sizes are whole numbers, hence mixtures of two
(`benchmarks.allocation_runs`). Candidates of `trace_roots` cost nothing: only their prompt is looked at.

**Controls.** `noise` is an oracle that looks at the wrong prefix: its lift is over `random × fixed` with
the same shape and the same tokens, since sharing prefixes alone gives some lift over flat. `oracle` sees the
exact value. A comparison with a paper is valid if the first is at zero and the second above 1.5.

The last line, all of it at equal tokens and with the shared predictor:

    contrast_lift       population A, trace × trace_roots: contrast over flat's exact 26.8 % (TRACE: 2.26)
    mixed_gain_points   population C, uucb × adaptive: mixed − flat's exact 58.1 %, points (InfoTree: 18.2)
    budget_overhead     its extra continuations, as a share of the regular ones (InfoTree: below 0.05)
    noise_lift          population A, trace × trace_roots with `noise`: contrast over random's, less one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.allocation_arms import Arm, Bench, Length
from benchmarks.allocation_plan import FACTORS, FLAT, GRID, RANDOM, Tier, variants
from benchmarks.allocation_report import Point, checks, headline, lift_of, plateau, row
from benchmarks.allocation_runs import Runs
from benchmarks.children import say
from benchmarks.cli import guarded
from benchmarks.partial import Partial
from benchmarks.population import EDITION, POPULATIONS, Population
from benchmarks.population_predictors import root_auc
from common.config_allocator import UucbRuleConfig
from common.errors import require

SEEDS = 20
ROWS = "rows"
"""Under this name a part keeps what is reported of it, once all of it is there."""


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocation", description=about)
    parser.add_argument("--quick", action="store_true", help="fewer arms and prompts: minutes on one core")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--waves", type=int, help="waves of 16 prompts that count, in each seed")
    parser.add_argument("--only", type=lambda text: text.split(","), help="some of A,B,C,variants,grid")
    parser.add_argument("--work", type=Path, help="where finished measurements are kept until all are there")
    parser.add_argument("--fresh", action="store_true", help="start from the beginning")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    require(found.seeds >= 2, "--seeds", "at least 2, for a standard error", found.seeds)
    require(found.waves is None or found.waves >= 1, "--waves", "at least 1", found.waves)
    for name in found.only or ():
        require(name in tier(found).parts, "--only", f"some of {', '.join(tier(found).parts)}", name)
    found.work = found.work or Path("runs/benchmarks") / ("allocation-quick" if found.quick else "allocation")
    return found


def tier(args: argparse.Namespace) -> Tier:
    """The tier that was asked for."""
    if args.quick:
        return Tier(Length(warm=6, burn_in=1, waves=args.waves or 1), quick=True)
    return Tier(Length(warm=8, burn_in=1, waves=args.waves or 5), quick=False)


def main(words: list[str]) -> int:
    """Measure what is missing, write once all parts are there, print; returns the exit code."""
    args = options(words)
    chosen = tier(args)
    session = results.begin("allocation", words, quick=args.quick)
    settings = {
        "edition": EDITION, "commit": session.git["commit"], "seeds": args.seeds,
        "length": asdict(chosen.length),
    }  # fmt: skip
    parts = {name: Partial(args.work / f"{name}.json", settings) for name in chosen.parts}
    for name in args.only or chosen.parts:
        if args.fresh:
            parts[name].remove()
        if parts[name].get(0, ROWS) is None:
            runs = Runs(Bench(chosen.length), args.seeds, parts[name], say)
            parts[name].keep(0, ROWS, list(measure(runs, chosen, name)))
    line = report(session, chosen, parts, args)
    print(line, flush=True)
    return 0


# ------------------------------------------------------------------------------------------- what is run


def measure(runs: Runs, chosen: Tier, part: str) -> Iterator[dict[str, Any]]:
    """What is reported of a part."""
    if part == "grid":
        yield weigh(runs)
    elif part == "variants":
        for population, arms in variants():
            yield from compare(runs, chosen, population, arms)
    else:
        yield from compare(runs, chosen, POPULATIONS[part], chosen.arms(POPULATIONS[part]))


def compare(
    runs: Runs, chosen: Tier, population: Population, arms: Iterable[Arm]
) -> Iterator[dict[str, Any]]:
    """Every arm of a population beside flat, at equal continuations and at equal tokens."""
    flat = runs.at(population, FLAT, population.group)
    leaves, tokens = flat.mean("leaves"), flat.mean("tokens")
    shared = runs.matched(population, RANDOM, "tokens", tokens).sums()
    targets = {"continuations": ("leaves", leaves), "tokens": ("tokens", tokens)}
    for arm in dict.fromkeys([FLAT, RANDOM, *arms]):
        for accounting in chosen.accountings(population, arm):
            unit, target = targets[accounting]
            slack = arm.overhead if arm.budget == "adaptive" and unit == "leaves" else 0.0
            found = runs.matched(population, arm, unit, target, slack)
            entry = row(found, flat.sums, accounting, population.flat_rate)
            if accounting == "tokens":
                mine, theirs = ([s.ratios()["contrast"] for s in of] for of in (found.sums(), shared))
                entry["contrast_over_random"] = lift_of(mine, theirs)
            yield entry


def scaled(point: Point) -> Point:
    """The point with 1 as its greatest factor."""
    value, exploration, entropy = point
    return value / max(point), exploration / max(point), entropy / max(point)


def weigh(runs: Runs) -> dict[str, Any]:
    """InfoTree's grid: the mixed-outcome ratio of `uucb × fixed` at each point, at equal continuations.

    The rule compares sums of weighted terms, so only the ratios of the weights matter: points that are
    multiples of each other are one measurement.
    """
    population, default = POPULATIONS[GRID], UucbRuleConfig()
    points: dict[Point, float] = {}
    measured: dict[Point, float] = {}
    for point in product(FACTORS, FACTORS, FACTORS):
        value, exploration, entropy = shape = scaled(point)
        if shape not in measured:
            weights = default.value * value, default.exploration * exploration, default.entropy * entropy
            found = runs.at(population, Arm("uucb", weights=weights), population.group)
            measured[shape] = found.mean("mixed")
        points[point] = measured[shape]
    best = max(points, key=lambda point: points[point])
    return {
        "factors": FACTORS,
        "default": [default.value, default.exploration, default.entropy],
        "distinct": len(measured),
        "points": [[*point, value] for point, value in points.items()],
        "best": [*best, points[best]],
        "plateau": plateau(points),
    }


# ---------------------------------------------------------------------------------------------- the end


def report(
    session: results.Session, chosen: Tier, parts: Mapping[str, Partial], args: argparse.Namespace
) -> str:
    """Write the results file once all parts are there, and the docs' tables where it is the committed one.

    Returns the last line, which speaks of what is there.
    """
    there = {name: kept for name, partial in parts.items() if (kept := partial.get(0, ROWS)) is not None}
    grid = there.get("grid", [{}])[0]
    rows = [each for name in POPULATIONS for each in there.get(name, [])]
    holds, values = checks(rows, grid), headline(rows)
    for check in holds:
        say(f"{'holds' if check['holds'] else 'does not hold'}: {check['asked']}: {check['measured']}")
    missing = [name for name in chosen.parts if name not in there]
    if missing:
        say(f"no results file yet: {', '.join(missing)} are missing; the others are kept in {args.work}")
        return results.headline_line(session.name, values)
    line = results.finish(
        session, values, raw(parts.values()), args.results,
        edition=EDITION, seeds=args.seeds, length=asdict(chosen.length), populations=worlds(),
        rows=rows, variants=there.get("variants", []), grid=grid, checks=holds,
    )  # fmt: skip
    tables.update_if_committed(args.results)
    for partial in parts.values():
        partial.remove()
    return line


def raw(parts: Iterable[Partial]) -> list[dict[str, Any]]:
    """The sums of each arm and size, seed by seed."""
    return [
        entry
        for partial in parts
        for name, entries in partial.finished.items()
        if name != f"0/{ROWS}"
        for entry in entries
    ]


def worlds() -> dict[str, dict[str, Any]]:
    """The populations, with what is known of them exactly."""
    return {
        name: {**asdict(each), "exact_flat_rate": each.mixed(each.group), "ceiling_auc": root_auc(each, 0.0)}
        for name, each in POPULATIONS.items()
    }


if __name__ == "__main__":
    sys.exit(guarded(main))
