"""How soon a killed allocator is back: a long journal, snapshots taken as the loop takes them, a new process.

    python -m benchmarks.allocator_recovery [inputs] [--actors 200,1000]

    simulated fleet ─▶ core ─▶ journal, a snapshot when one is due ─▶ dies ─▶ new process: import, recover

It dies at the worst moment: as many inputs behind the newest snapshot as there may ever be.

Fleets of several sizes; the last line is of the largest: `recovery: inputs=… replayed=… seconds=… process_s=…
whole_journal_s=… pause_ms=… snapshot_mb=…`: what was replayed behind the newest snapshot, seconds until the
books are back, the same with the start of Python and all imports, and without any snapshot; the longest that
a snapshot held up the loop.
Results go to `results/recovery.json` (fewer than 100,000 inputs: `recovery-quick.json`).
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allocator.core import AllocatorCore, Handled, Send
from allocator.recovery import Recovery, recover
from allocator.replay import INPUTS
from allocator.settings import GC_THRESHOLD, Settings
from allocator.snapshots import MOST_INPUTS, Snapshots
from benchmarks import results, tables
from benchmarks.allocator_fleet import FAULTS
from benchmarks.children import say
from benchmarks.cli import guarded, numbers
from benchmarks.fleet import Fleet, FleetConfig
from common.config_allocator import BudgetConfig, RandomRuleConfig
from common.journal import JournalWriter
from common.messages import Message
from common.rundir import RunDir

INPUTS_WANTED = 100_000
CONTINUATIONS = 16
RULE = RandomRuleConfig(chains=2, expansions=2)
REPEATS = 3
ROUND = 16
"""Inputs that the loop handles before it writes."""


def bounds(actors: int) -> Settings:
    """Of a run that keeps so many actors busy."""
    batch = max(8, actors // 2)
    return Settings(steps=1_000_000, batch_trees=batch, max_policy_lag=2, max_score_staleness=4)


def fleet_of(actors: int) -> Fleet:
    config = FleetConfig(actors=actors, slots=8, faults=FAULTS)
    return Fleet(bounds(actors), config, RULE, BudgetConfig(continuations=CONTINUATIONS))


class Kept:
    """A core with the journal and the snapshots that the loop would keep of it."""

    def __init__(self, core: AllocatorCore, rundir: RunDir, last_snapshot: int) -> None:
        self.core = core
        self.last_snapshot = last_snapshot
        """Inputs after which none is taken any more."""
        self.journal = JournalWriter(rundir.allocator_journal)
        self.snapshots = Snapshots(rundir.allocator_snapshots)
        self._handle, self._tick, self._take = core.handle, core.tick, core.take_records
        self._records: list[tuple[str, dict[str, Any]]] = []
        Recovery(core).begin(self.journal, 0.0, run="run")
        mine = {"handle": self.handle, "tick": self.tick, "take_records": self.take_records}
        for name, method in mine.items():
            setattr(core, name, method)

    def handle(self, peer: str, message: Message, now: float) -> Handled:
        self.journal.append("input", peer=peer, now=now, message=message)
        self.snapshots.count_input()
        handled = self._handle(peer, message, now)
        self._keep()
        return handled

    def tick(self, now: float) -> list[Send]:
        sends = self._tick(now)
        self._keep()
        return sends

    def take_records(self) -> list[tuple[str, dict[str, Any]]]:
        records, self._records = self._records, []
        return records

    def _keep(self) -> None:
        for kind, values in self._take():
            self.journal.append(kind, **values)
            self._records.append((kind, values))
            if kind in INPUTS:
                self.snapshots.count_input()
        left = self.last_snapshot - self.snapshots.inputs
        if self.snapshots.inputs % ROUND or left < 0:
            return
        self.journal.flush(sync=False)
        if self.snapshots.due(self.journal.end, time.perf_counter()) or left < ROUND:
            self.snapshots.close()
            self.journal.flush(sync=True)
            self.snapshots.take(self.core, self.journal.end, time.perf_counter())

    def close(self) -> None:
        self.snapshots.close()
        self.journal.close()


def run(inputs: int, actors: int, folder: Path) -> dict[str, Any]:
    """Grow a journal of `inputs` messages and ticks in `folder`, then take it up again; see the module."""
    rundir, fleet = RunDir.create(folder, "run"), fleet_of(actors)
    kept = Kept(fleet.core, rundir, inputs - MOST_INPUTS)
    fleet.run(until=lambda: kept.snapshots.inputs >= inputs and kept.snapshots.tail >= MOST_INPUTS)
    kept.close()
    settings = fleet.core.state.settings

    def fresh() -> AllocatorCore:
        return fleet_of(actors).core

    seconds, found = timed(lambda: recover(fresh, rundir))
    process_s = min(in_a_new_process(rundir.path, actors) for _ in range(REPEATS))
    for path in rundir.allocator_snapshots.iterdir():
        path.unlink()
    whole_s, _ = timed(lambda: recover(fresh, rundir), repeats=1)
    snapshots = kept.snapshots
    return {
        "inputs": found.inputs, "replayed": found.replayed, "seconds": seconds, "process_s": process_s,
        "whole_journal_s": whole_s, "pause_ms": 1e3 * snapshots.longest_pause_s,
        "snapshot_mb": snapshots.bytes / 1e6, "snapshots": snapshots.written,
        "journal_mb": rundir.allocator_journal.stat().st_size / 1e6, "actors": actors,
        "trees": settings.batch_trees, "open_trees": found.core.open_trees,
    }  # fmt: skip


def timed(act: Callable[[], Recovery], repeats: int = REPEATS) -> tuple[float, Recovery]:
    """The best of several times, and the last result."""
    times = []
    while True:
        gc.collect()
        began = time.perf_counter()
        found = act()
        times.append(time.perf_counter() - began)
        if len(times) >= repeats:
            return min(times), found


def in_a_new_process(run_path: Path, actors: int) -> float:
    """Seconds from the start of Python to the books being back."""
    code = f"from benchmarks.allocator_recovery import take_up; take_up({str(run_path)!r}, {actors})"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], cwd=results.ROOT, check=True)
    return time.perf_counter() - began


def take_up(run_path: str, actors: int) -> None:
    """What a restarted allocator does before it serves."""
    gc.set_threshold(*GC_THRESHOLD)
    recover(lambda: fleet_of(actors).core, RunDir.open(Path(run_path)))


def main(words: list[str]) -> int:
    """Simulate, recover, write, print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator_recovery")
    parser.add_argument("inputs", type=int, nargs="?", default=INPUTS_WANTED, help="length of the journal")
    parser.add_argument("--actors", type=numbers, default=[200, 1000], help="sizes of the fleet, by commas")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    args = parser.parse_args(words)
    session = results.begin("recovery", words, module="allocator_recovery", quick=args.inputs < INPUTS_WANTED)
    gc.set_threshold(*GC_THRESHOLD)
    runs = []
    for actors in sorted(args.actors):
        with tempfile.TemporaryDirectory() as folder:
            runs.append({"actors": actors, **run(args.inputs, actors, Path(folder))})
        say(" ".join(f"{name}={value:g}" for name, value in runs[-1].items()))
    names = ("inputs", "replayed", "seconds", "process_s", "whole_journal_s", "pause_ms", "snapshot_mb")
    line = results.finish(session, {name: runs[-1][name] for name in names}, runs, args.results)
    tables.update_if_committed(args.results)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
