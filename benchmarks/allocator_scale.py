"""How the allocator's core scales: time per grant and memory per anchor, from 10³ to 10⁶ open anchors.

    python -m benchmarks.allocator_scale [--quick] [--repeats N] [--results DIR]

A grant is counted with all it costs the core: the rule's decision, the lease and its message, `Starting`,
three turns, `Finished`, and its share of opening, closing and delivering its tree. The simulator's, the
wire's and the actors' own time is left out (`benchmarks.allocator_load`). CPU seconds of one core; with the
journal, seconds by the clock, since it waits for the disk (`sync_us` of its windows: where that is most of
it, another disk, or one that nobody else writes to, gives another figure).

    growth        10³ … 10⁶ anchors in trees of about 64, a thousand actors, rule `random`
    actors        10² … 10⁵ actors at the greatest number of anchors
    journal       the greatest and the smallest again, every input and record written as the real loop does
    rules         `flat`, and `uucb` with the learned predictor, which weighs all anchors of a tree each time
    large trees   few trees of up to 10⁴ anchors: what a rule that looks at its whole tree costs there

Each cell runs in a process of its own. Memory is what the process grew by until the anchors were there, over
their number; turns hold one token, so that it is the books and not their content that is measured. The last
line is `allocator_scale: grants_per_s= grants_per_s_journal= growth= bytes_per_anchor=`, at the greatest
number of anchors; growth is µs per grant there over µs per grant at 10³.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from allocator.settings import GC_THRESHOLD
from benchmarks import results, tables
from benchmarks.allocator_load import Journal, Load
from benchmarks.children import say
from benchmarks.cli import guarded
from common.config_allocator import PredictorConfig, RandomRuleConfig, RuleConfig, UucbRuleConfig
from common.journal import JournalWriter
from common.predictors import make_predictor

CONTINUATIONS = 66
"""Of a tree: 2 chains and 16 rounds of 2 × 2. Half grown, it has about 64 open anchors."""
GRANTS, QUICK_GRANTS = 20_000, 5_000
WINDOWS = 5
"""Stretches of the measurement; the median counts, so that one disturbed stretch does not."""
FILL_SLOTS = 4
"""One actor per tree with as many slots as a round has leases grows all trees alike."""
RULES: dict[str, RuleConfig] = {
    "random": RandomRuleConfig(),
    "flat": RuleConfig(),
    "uucb": UucbRuleConfig(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement."""

    part: str
    rule: str = "random"
    trees: int
    continuations: int = CONTINUATIONS
    actors: int = 1000
    slots: int = 8
    grants: int = GRANTS
    journal: bool = False


def cells(quick: bool) -> list[Cell]:
    """What to measure, smallest first within each part."""
    grants = QUICK_GRANTS if quick else GRANTS
    sizes = [16, 160, 1_600] if quick else [16, 160, 1_600, 16_000]
    most = sizes[-1]
    found = [Cell(part="growth", trees=trees, grants=grants) for trees in sizes]
    found += [
        Cell(part="actors", trees=most, actors=actors, slots=max(1, min(8, 100_000 // actors)), grants=grants)
        for actors in ([100, 10_000] if quick else [100, 10_000, 100_000])
    ]
    found += [Cell(part="journal", trees=trees, grants=grants, journal=True) for trees in (sizes[0], most)]
    found.append(Cell(part="rules", rule="flat", trees=160, grants=grants))
    found.append(Cell(part="rules", rule="uucb", trees=160, grants=grants // 5))
    for rule in ("random", "uucb"):
        # `uucb` would take a quarter of an hour to fill trees of 5,006: each decision weighs all anchors.
        for continuations in (66, 506) if quick or rule == "uucb" else (66, 506, 5_006):
            few = max(50, min(grants, 2_000_000 // continuations**2 if rule == "uucb" else grants))
            part = Cell(part="large trees", rule=rule, trees=16, continuations=continuations, grants=few)
            found.append(part)
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """Fill, settle, measure; for a process of its own."""
    gc.set_threshold(*GC_THRESHOLD)
    process = psutil.Process()
    load = Load(
        RULES[cell.rule], trees=cell.trees, continuations=cell.continuations,
        predictor=make_predictor(PredictorConfig(name="shared")) if cell.rule == "uucb" else None,
    )  # fmt: skip
    before = process.memory_info().rss
    load.hire(cell.trees, FILL_SLOTS)
    load.run(lambda: load.grants >= cell.trees * cell.continuations // 2)
    gc.collect()
    anchors = load.anchors
    memory = process.memory_info().rss - before
    _staff(load, cell)
    load.run_for(cell.grants // WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        if not cell.journal:
            windows = _windows(load, cell)
        else:
            with JournalWriter(Path(folder) / "journal.tw") as writer:
                load.journal = Journal(writer)
                windows = _windows(load, cell)
    clock = "wall_us" if cell.journal else "cpu_us"
    spent = statistics.median(window[clock] for window in windows)
    return {
        **asdict(cell),
        "anchors": anchors,
        "anchors_after": load.anchors,
        "bytes_per_anchor": memory / anchors,
        "us_per_grant": spent,
        "grants_per_s": 1e6 / spent,
        "windows": windows,
    }


def _staff(load: Load, cell: Cell) -> None:
    if cell.actors < cell.trees:
        load.dismiss(cell.trees - cell.actors)
    else:
        load.hire(cell.actors - cell.trees, cell.slots)


def _windows(load: Load, cell: Cell) -> list[dict[str, float]]:
    found = []
    for _ in range(WINDOWS):
        before = load.totals()
        load.run_for(cell.grants // WINDOWS)
        change = {name: value - before[name] for name, value in load.totals().items()}
        grants = change["grants"]
        found.append(
            {
                "grants": grants,
                "cpu_us": 1e6 * change["cpu_s"] / grants,
                "wall_us": 1e6 * change["wall_s"] / grants,
                "sync_us": 1e6 * change["sync_s"] / grants,
                "messages_per_grant": change["messages"] / grants,
            }
        )
    return found


# ------------------------------------------------------------------------------------------ the headline


def headline(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """From the cells of `growth` and `journal`; of repeats, the median."""

    def at(part: str, pick: Any, key: str) -> float:
        sizes = [run["trees"] for run in runs if run["part"] == part]
        size = pick(sizes)
        chosen = [float(run[key]) for run in runs if run["part"] == part and run["trees"] == size]
        return statistics.median(chosen)

    return {
        "grants_per_s": at("growth", max, "grants_per_s"),
        "grants_per_s_journal": at("journal", max, "grants_per_s"),
        "growth": at("growth", max, "us_per_grant") / at("growth", min, "us_per_grant"),
        "bytes_per_anchor": at("growth", max, "bytes_per_anchor"),
    }


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator_scale")
    parser.add_argument("--quick", action="store_true", help="up to 10^5 anchors and 10^4 actors")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each cell")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Measure, write, print; returns the exit code."""
    args = options(words)
    session = results.begin("allocator_scale", words, quick=args.quick)
    runs = []
    fresh = multiprocessing.get_context("spawn")
    for cell in cells(args.quick):
        for _ in range(args.repeats):
            with fresh.Pool(1) as pool:
                found = pool.apply(measure, (cell,))
            runs.append(found)
            say(
                f"{cell.part:12} {cell.rule:7} anchors {found['anchors']:>8} actors {cell.actors:>6} "
                f"{found['us_per_grant']:9.1f} us/grant {found['grants_per_s']:9.0f}/s "
                f"{found['bytes_per_anchor']:6.0f} B/anchor"
            )
    line = results.finish(session, headline(runs), runs, args.results)
    tables.update_if_committed(args.results)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
