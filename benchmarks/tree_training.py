"""Training on packed trees against training on their branches: the same trees, model and process.

    python -m benchmarks.tree_training [--quick] [--sharing 1,2,…] [--repeats N] [--tokens N] [--budget N]

For each sharing a fresh process alternates updates (forward, backward, step) of the two layouts on the same
rows, the packed one twice: packed against packed is the null control. Branch by branch is batched as well:
rows of similar length together, with the same budget of tokens, in torch's causal kernel. Then each layout
has a process of its own for its memory. Trees are drawn by `benchmarks.training_trees`.

The limit is the token ratio: tokens of the branches for each different one. It is not always within reach:
tokens behind a long prefix attend to all of it, packed or not, and a step of the optimiser costs the same;
nor is it a wall: branches of different lengths are filled up, packed trees are not.

The last line is `tree_training: share_of_limit= at_sharing_1= memory_ratio=`.

    share_of_limit   CPU seconds branch by branch / packed / token ratio, at the largest sharing
    at_sharing_1     CPU seconds branch by branch / packed, where nothing is shared but a prompt
    memory_ratio     memory that the passes need, packed / branch by branch, at the largest sharing and an
                     equal budget of tokens for one pass
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results, tables
from benchmarks.children import run_command, say
from benchmarks.cli import guarded, numbers
from benchmarks.training_trees import BRANCH, branches_of
from benchmarks.tree_training_arm import PACKED_AGAIN
from common.errors import ConfigError

SHARING, QUICK_SHARING = [1, 2, 3, 4, 6, 8], [1, 8]
REPEATS, QUICK_REPEATS = 4, 2
TOKENS, QUICK_TOKENS = 20_000, 10_000
"""Of the branches of a batch, about: 16 seconds branch by branch on one core."""
BUDGET = 2560
"""Tokens of one pass: four branches, or two trees at the largest sharing."""


def options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree_training")
    parser.add_argument("--quick", action="store_true", help="sharing 1 and 8, two repeats: three minutes")
    parser.add_argument("--sharing", type=numbers, help="branches' tokens for each different one, about")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--tokens", type=int, help="of the branches of a batch")
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens of one pass")
    parser.add_argument("--results", type=Path, default=results.RESULTS)
    args = parser.parse_args(words)
    args.sharing = args.sharing or (QUICK_SHARING if args.quick else SHARING)
    args.repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    if min(args.sharing) < 1 or args.budget < BRANCH or args.repeats < 1:
        raise ConfigError(
            f"sharing and repeats must be at least 1, and the budget a branch of {BRANCH} tokens"
        )
    return args


def measure(args: argparse.Namespace, sharing: int, folder: Path) -> dict[str, Any]:
    """One sharing: times in one process, memory in one for each layout."""
    trees = max(1, round(args.tokens / (BRANCH * branches_of(sharing))))
    shape = ["--sharing", str(sharing), "--budget", str(args.budget)]
    say(f"sharing {sharing}: {trees} trees, {args.repeats} repeats")
    times = ["time", *shape, "--trees", str(trees), "--repeats", str(args.repeats)]
    found = _child(times, folder / f"time-{sharing}")
    # Memory is compared with full passes in both layouts: one line of packed trees at least.
    full = max(trees, args.budget * sharing // (BRANCH * branches_of(sharing)))
    memory = {
        layout: _child(
            ["memory", *shape, "--trees", str(full), "--layout", layout],
            folder / f"memory-{sharing}-{layout}",
        )["mib"]
        for layout in ("rows", "tree")
    }
    run = {"sharing": sharing, "trees": trees, **found, "memory_mib": memory, **figures(found, memory)}
    ratio, speed_up, null = (run[name] for name in ("token_ratio", "speed_up_cpu", "null"))
    say(f"    token ratio {ratio:.2f}, speed-up {speed_up:.2f} (CPU), null {null:.3f}")
    return run


def _child(words: list[str], place: Path) -> dict[str, Any]:
    out = place.with_suffix(".json")
    command = [sys.executable, "-m", "benchmarks.tree_training_arm", *words, "--out", str(out)]
    run_command(place.name, command, place.with_suffix(".log"))
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def figures(found: dict[str, Any], memory: dict[str, float]) -> dict[str, float]:
    """What is compared: medians over the repeats, in CPU seconds, which other processes disturb least."""
    cpu = {arm: _median(runs, "cpu") for arm, runs in found["seconds"].items()}
    wall = {arm: _median(runs, "wall") for arm, runs in found["seconds"].items()}
    packed = statistics.mean([cpu["tree"], cpu[PACKED_AGAIN]])
    speed_up = cpu["rows"] / packed
    return {
        "speed_up_cpu": speed_up,
        "speed_up_wall": wall["rows"] / statistics.mean([wall["tree"], wall[PACKED_AGAIN]]),
        "share_of_limit": speed_up / found["token_ratio"],
        "null": cpu["tree"] / cpu[PACKED_AGAIN],
        "memory_ratio": memory["tree"] / memory["rows"],
    }


def _median(runs: Sequence[dict[str, float]], clock: str) -> float:
    return statistics.median(run[clock] for run in runs)


def headline(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The last line's figures; see the module docstring."""
    by_sharing = {run["sharing"]: run for run in runs}
    most = by_sharing[max(by_sharing)]
    least = by_sharing[min(by_sharing)]
    return {
        "share_of_limit": most["share_of_limit"],
        "at_sharing_1": least["speed_up_cpu"],
        "memory_ratio": most["memory_ratio"],
    }


def main(words: list[str]) -> int:
    """Measure, write, print; returns the exit code."""
    args = options(words)
    session = results.begin("tree_training", words, quick=args.quick)
    with tempfile.TemporaryDirectory(prefix="tree-training-") as folder:
        runs = [measure(args, sharing, Path(folder)) for sharing in args.sharing]
    line = results.finish(session, headline(runs), runs, args.results, budget=args.budget)
    tables.update_if_committed(args.results)
    print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
