"""What waiting costs a tree search, and what not waiting costs it: D from 0 to 64, in simulated time.

    python -m benchmarks.speculation [--full] [--huge] [--real] [--seeds 0,1] [--jobs N] [--work DIR]
    python -m benchmarks.speculation --ratios [--seeds 0,1] [--jobs N] [--work DIR]

Tree search over flat sampling at equal tokens, on the same slots with the same number of trees in flight. The
allocator's core is the real one; actors, learner and time are simulated (`benchmarks.fleet`), turns take what
a frozen heavy-tailed model says (`benchmarks.latencies`), or all as long: the control. Beside the overhead
stands what speculation does to the search: `benchmarks.speculation_figures` defines each figure.

Controls: flat sampling again on other prompts (`null`: its overhead is the noise), and turns without a tail.

The quick tier, which is the default, looks at 16 slots, and at 1,000 slots where it is hard: one tree per
eight slots, heavy tails; with several seeds at `trace` as well. `--huge` adds 10,000 slots, `--full` ratios
from 1/8 to 2, more D, and the rules `trace` and `random` everywhere. `--real` adds real processes over real
sockets (`benchmarks.speculation_real`). Cells that have finished are kept in the working directory and not
repeated. The last line, of `uucb` at its default D in the hard cell of 1,000 slots, is
`speculation: overhead_sync= overhead= rifb_loss= agreement=`.

`--ratios` measures the cells of 16 slots in `--full` alone, into a results file of their own: trees to slots
from 1/8 to 2, every D, every rule. Its last line, of `uucb` at its default D with heavy tails, is
`speculation_ratios: overhead_eighth= overhead_half= overhead_two=`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.children import say
from benchmarks.cli import guarded, numbers
from benchmarks.partial import Partial
from benchmarks.speculation_arms import Cell, lessons, measure
from benchmarks.speculation_figures import Row, compare, find, over_seeds
from benchmarks.speculation_real import measure_real

STALENESS = (0, 1, 2, 4, 8, 16, 32, 48, 64)
FEW = (0, 8, 16, 32, 64)
RATIOS = (0.125, 0.25, 0.5, 1.0, 2.0)
HARD_RATIO = 0.125
DEFAULTS = {"uucb": 48, "trace": 8, "random": 24}
"""D that each rule is recommended to run with where trees are fewer than slots; see docs/benchmarks.md."""
TOKENS_PER_CONTINUATION = 70
"""About what one costs: fixes how many tokens are measured for a number of trees."""
HEADLINE_SLOTS = 1_000
HEADLINE_RATIOS = {"eighth": 0.125, "half": 0.5, "two": 2.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """All arms of one cell for one seed."""

    cell: Cell
    arms: tuple[tuple[str, int], ...]
    seed: int
    trees: int
    """How many trees' worth of tokens are measured."""

    @property
    def name(self) -> str:
        cell = self.cell
        kind = "storm" if cell.storm else "tail" if cell.tail else "no-tail"
        rules = "+".join(dict.fromkeys(rule for rule, _ in self.arms))
        return f"{cell.slots}/{cell.ratio:g}/{kind}/{rules}"


def plan(full: bool, seeds: Sequence[int], huge: bool = False) -> list[Task]:
    """What to measure, the cheap first."""
    if full:
        return list(_full(seeds))
    return [*_quick(seeds), *(_huge(seeds) if huge else ())]


def _arms(rule: str, staleness: Iterable[int]) -> tuple[tuple[str, int], ...]:
    return tuple((rule, value) for value in dict.fromkeys([*staleness, DEFAULTS[rule]]))


def _quick(seeds: Sequence[int]) -> Iterator[Task]:
    few = _arms("uucb", (0, 8, 16, 32, 64))
    hard = Cell(slots=HEADLINE_SLOTS, ratio=HARD_RATIO, tail=True)
    for seed in seeds:
        for tail in (True, False):
            yield Task(cell=Cell(slots=16, ratio=0.125, tail=tail), arms=few, seed=seed, trees=40)
        yield Task(cell=hard, arms=_arms("uucb", (0,)), seed=seed, trees=110)
        if len(seeds) > 1:
            yield Task(cell=hard, arms=_arms("trace", (0,)), seed=seed, trees=110)


def ratios(seeds: Sequence[int]) -> Iterator[Task]:
    """Few slots: every ratio, rule and bound."""
    for seed, ratio, tail in product(seeds, RATIOS, (True, False)):
        cell = Cell(slots=16, ratio=ratio, tail=tail)
        yield Task(cell=cell, arms=_arms("uucb", STALENESS), seed=seed, trees=32)
        for rule in ("trace", "random"):
            yield Task(cell=cell, arms=_arms(rule, FEW), seed=seed, trees=32)


def _full(seeds: Sequence[int]) -> Iterator[Task]:
    yield from ratios(seeds)
    for seed in seeds:
        hard = Cell(slots=HEADLINE_SLOTS, ratio=HARD_RATIO, tail=True)
        yield Task(cell=hard, arms=_arms("uucb", (0, 8, 16, 32, 64)), seed=seed, trees=200)
        for rule in ("trace", "random"):
            yield Task(cell=hard, arms=_arms(rule, FEW), seed=seed, trees=200)
    for cell in (
        Cell(slots=HEADLINE_SLOTS, ratio=0.125, tail=False),
        Cell(slots=HEADLINE_SLOTS, ratio=0.5, tail=True),
        Cell(slots=HEADLINE_SLOTS, ratio=1.0, tail=True),
    ):
        yield Task(cell=cell, arms=_arms("uucb", (0, 8)), seed=seeds[0], trees=cell.trees // 2)
    storm = Cell(slots=HEADLINE_SLOTS, ratio=HARD_RATIO, tail=True, storm=True)
    yield Task(cell=storm, arms=_arms("uucb", (0,)), seed=seeds[0], trees=125)
    yield from _huge(seeds)


def _huge(seeds: Sequence[int]) -> Iterator[Task]:
    cell = Cell(slots=10_000, ratio=HARD_RATIO, tail=True)
    yield Task(cell=cell, arms=_arms("uucb", (0,)), seed=seeds[0], trees=cell.trees // 2)


def run_task(task: Task) -> list[Row]:
    """Simulate all arms of a cell; for a process of its own."""
    tokens = task.trees * task.cell.continuations * TOKENS_PER_CONTINUATION
    learned = lessons()
    flat = measure(task.cell, "flat", 0, task.seed, tokens, learned)
    null = measure(task.cell, "flat", 0, task.seed + 10_000, tokens, learned)
    arms = {(rule, d): measure(task.cell, rule, d, task.seed, tokens, learned) for rule, d in task.arms}
    return compare(task.cell, task.seed, flat, arms, null)


# ------------------------------------------------------------------------------------------ the headline


def headline_of_ratios(rows: Sequence[Row]) -> dict[str, float]:
    """Overhead of `uucb` at its default D where tails are heavy, by trees per slot."""
    where = {"slots": 16, "tail": True, "rule": "uucb", "staleness": DEFAULTS["uucb"]}
    found = {name: find(rows, ratio=ratio, **where) for name, ratio in HEADLINE_RATIOS.items()}
    return {f"overhead_{name}": row["overhead"] for name, row in found.items() if row is not None}


def headline(rows: Sequence[Row]) -> dict[str, float]:
    """Of the hard cell: the synchronous search, and the default D.

    Raises:
        BenchmarkFailed: it was not measured.
    """
    where = {"slots": HEADLINE_SLOTS, "ratio": HARD_RATIO, "tail": True, "storm": False, "rule": "uucb"}
    synchronous = find(rows, staleness=0, **where)
    default = find(rows, staleness=DEFAULTS["uucb"], **where)
    if synchronous is None or default is None:
        raise results.BenchmarkFailed(f"the cell of the headline ({where}) was not measured")
    return {
        "overhead_sync": synchronous["overhead"],
        "overhead": default["overhead"],
        "rifb_loss": default["rifb_loss"],
        "agreement": default["agreement"],
    }


def told(row: Row) -> str:
    """One line on the screen."""
    names = ("overhead", "rifb_loss", "agreement", "idle", "wasted")
    shown = {name: row[name] for name in names if name in row}
    figures = " ".join(f"{name} {100 * value:6.1f} %" for name, value in shown.items())
    return f"    {row['rule']:6} D={row['staleness']:<3} {figures}"


# ------------------------------------------------------------------------------------------ the command


def options(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("--full", action="store_true", help="all slots, ratios, rules and seeds: hours")
    parser.add_argument("--huge", action="store_true", help="10,000 slots too: twenty minutes more")
    parser.add_argument("--ratios", action="store_true", help="16 slots with every ratio, and nothing else")
    parser.add_argument("--real", action="store_true", help="real processes too: some minutes more")
    parser.add_argument("--jobs", type=int, default=1, help="cells measured at once")
    parser.add_argument("--seeds", type=numbers, help="of the arms (default: 0, with --full 0 to 4)")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/speculation"))
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    found = parser.parse_args(words)
    found.seeds = found.seeds or (list(range(5)) if found.full else [0])
    return found


def main(words: list[str]) -> int:
    """Measure, write, print; returns the exit code."""
    args = options(words)
    name = "speculation_ratios" if args.ratios else "speculation"
    session = results.begin(name, words, module="speculation", quick=not (args.full or args.ratios))
    args.work.mkdir(parents=True, exist_ok=True)
    settings = {
        "commit": session.git["commit"],
        "dirty": session.git["dirty"],
        "full": args.full or args.ratios,
    }
    partial = Partial(args.work / "partial.json", settings)
    tasks = list(ratios(args.seeds)) if args.ratios else plan(args.full, args.seeds, args.huge)
    todo = [task for task in tasks if partial.get(task.seed, task.name) is None]
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for task, rows in zip(todo, pool.imap(run_task, todo), strict=True):
            partial.keep(task.seed, task.name, rows)
            say(f"{task.name}, seed {task.seed}, {len(rows)} arms")
            for row in rows:
                say(told(row))
    runs = [row for task in tasks for row in partial.get(task.seed, task.name) or []]
    real = measure_real(args.work, args.seeds[0], DEFAULTS["uucb"]) if args.real else []
    rows = over_seeds(runs)
    more: dict[str, Any] = {"rows": rows, "real": real, "defaults": DEFAULTS}
    values = headline_of_ratios(rows) if args.ratios else headline(rows)
    line = results.finish(session, values, runs, args.results, **more)
    tables.update_if_committed(args.results)
    partial.remove()
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
