"""How fast the allocator decides: a simulated fleet of 1,000 actors passes a million events through the core.

    python -m benchmarks.allocator_fleet [events] [rule] [--seed S]

Writes `results/fleet.json` (fewer than a million events: `fleet-quick.json`). The last line is
`fleet: events=… seconds=… events_per_s=…`. One core; the simulator's own time is included.
"""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

from allocator.settings import GC_THRESHOLD, Settings
from benchmarks import results, tables
from benchmarks.cli import guarded
from benchmarks.fleet import Faults, Fleet, FleetConfig
from common.config_allocator import BudgetConfig, RandomRuleConfig, RuleConfig

ACTORS = 1000
EVENTS = 1_000_000
FAULTS = Faults(
    lost=0.002, duplicated=0.005, failed=0.005, declined=0.001, actor_life_s=600, actor_pause=0.0005
)
"""A bad day: about a twentieth of all messages repeated, every actor dead within ten minutes."""


def run(events: int = EVENTS, rule: str = "random", seed: int = 0) -> dict[str, Any]:
    """Simulate until the core has handled `events` messages and ticks; see `Fleet.run` for the result.

    Raises AssertionError when the conservation law does not hold at the end.
    """
    chosen = RandomRuleConfig(chains=2, expansions=2) if rule == "random" else RuleConfig()
    settings = Settings(steps=1_000_000, batch_trees=500, max_policy_lag=2, max_score_staleness=4)
    fleet = Fleet(
        settings, FleetConfig(actors=ACTORS, faults=FAULTS), chosen, BudgetConfig(continuations=6), seed
    )
    thresholds = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLD)
    try:
        result = fleet.run(max_events=events)
    finally:
        gc.set_threshold(*thresholds)
    fleet.check()
    return result


def main(words: list[str]) -> int:
    """Simulate, write, print; returns the exit code."""
    args = _options(words)
    session = results.begin("fleet", words, module="allocator_fleet", quick=args.events < EVENTS)
    found = run(args.events, args.rule, args.seed)
    for name, value in sorted(found["stats"].items()):
        print(f"{name:32} {value:g}")
    headline = {"events": found["events"], "seconds": found["seconds"], "events_per_s": found["events_per_s"]}
    raw = {"rule": args.rule, "seed": args.seed, "actors": ACTORS, **found}
    line = results.finish(session, headline, [raw], args.results)
    tables.update_if_committed(args.results)
    print(line, flush=True)
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator_fleet")
    parser.add_argument("events", type=int, nargs="?", default=EVENTS, help="messages and ticks to handle")
    parser.add_argument("rule", nargs="?", default="random", choices=("random", "flat"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="where the results file goes")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(guarded(main))
