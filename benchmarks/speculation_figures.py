"""What the arms of one cell and seed say beside each other, and the seeds of one arm together.

* overhead: time per accepted token over that of flat sampling, minus 1. Time is taken where turns cost what
  they cost on average: slots · seconds over useful slot-seconds. `raw_overhead` compares the clocks, and
  holds besides how heavy the tails were that one arm happened to draw and the other did not.
* RIFB, mixed: over prompts that all arms finished, up to the first one that some arm did not; of each tree
  the first continuations that cost as many tokens as the synchronous search spent on that prompt.
* agreement: see `benchmarks.foresight`. `same_anchor`: continuations that start at the anchor, by (owner,
  offset), at which the run with D = 0 started its continuation of the same number; after the first one that
  differs the trees are different ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.speculation_arms import Cell, Grown, Measured

SYNCHRONOUS = 0
NULL = "null"
"""Flat sampling again, on other prompts: its overhead is noise."""
Row = dict[str, Any]
KEY = ("slots", "ratio", "tail", "storm", "rule", "staleness")
FIGURES = (
    "overhead", "raw_overhead", "rifb", "rifb_loss", "mixed", "mixed_ratio", "agreement", "same_anchor",
    "idle", "wasted", "revoked", "declined", "speculative", "changed", "tokens_per_tree",
)  # fmt: skip


def compare(
    cell: Cell, seed: int, flat: Measured, arms: Mapping[tuple[str, int], Measured], null: Measured
) -> list[Row]:
    """One row for flat sampling, its repeat, and each (rule, D) of `arms`."""
    prompts = common_prompts([flat, *arms.values()])
    rows = [_row(cell, seed, "flat", 0, flat, flat), _row(cell, seed, NULL, 0, null, flat)]
    for (rule, staleness), arm in arms.items():
        row = _row(cell, seed, rule, staleness, arm, flat)
        synchronous = arms.get((rule, SYNCHRONOUS))
        if synchronous is not None:
            row |= _quality(arm.trees, synchronous.trees, flat.trees, prompts)
        rows.append(row)
    return rows


def common_prompts(arms: Sequence[Measured]) -> list[int]:
    """Trees that all arms finished, up to the first that some arm did not: the slowest are not left out."""
    count = 0
    while all(count in arm.trees for arm in arms):
        count += 1
    return list(range(count))


def _row(cell: Cell, seed: int, rule: str, staleness: int, arm: Measured, flat: Measured) -> Row:
    return {
        "slots": cell.slots,
        "ratio": cell.ratio,
        "tail": cell.tail,
        "storm": cell.storm,
        "rule": rule,
        "staleness": staleness,
        "seed": seed,
        "overhead": flat.useful / arm.useful - 1,
        "raw_overhead": arm.seconds / flat.seconds - 1,
        "agreement": arm.agreement,
        "idle": 1 - arm.occupied,
        "wasted": 1 - arm.useful / arm.occupied,
        "revoked": arm.revoked,
        "declined": arm.declined,
        "speculative": arm.speculative,
        "changed": arm.changed,
        "tokens_per_tree": arm.tokens_per_tree,
        "finished": len(arm.trees),
        "events": arm.events,
        "cpu_s": arm.cpu_s,
    }


def _quality(
    trees: Mapping[int, Grown],
    synchronous: Mapping[int, Grown],
    flat: Mapping[int, Grown],
    prompts: Sequence[int],
) -> Row:
    """Contrast at equal tokens, prompt by prompt."""
    paid = {i: sum(synchronous[i].tokens) for i in prompts}
    ours = [trees[i].rifb(paid[i]) for i in prompts]
    base = [synchronous[i].rifb() for i in prompts]
    mixed = statistics.fmean(trees[i].mixed(paid[i]) for i in prompts)
    mixed_base = statistics.fmean(synchronous[i].mixed() for i in prompts)
    mean, mean_base = statistics.fmean(ours), statistics.fmean(base)
    same = [_same_anchor(trees[i], synchronous[i]) for i in prompts]
    compared = sum(count for _, count in same)
    return {
        "prompts": len(prompts),
        "rifb": mean,
        "rifb_loss": 1 - mean / mean_base,
        "rifb_loss_se": _standard_error([b - a for a, b in zip(ours, base, strict=True)]) / mean_base,
        "rifb_flat": statistics.fmean(flat[i].rifb(paid[i]) for i in prompts),
        "mixed": mixed,
        "mixed_flat": statistics.fmean(flat[i].mixed(paid[i]) for i in prompts),
        "mixed_ratio": mixed / mixed_base,
        "same_anchor": sum(equal for equal, _ in same) / compared if compared else 1.0,
    }


def _same_anchor(tree: Grown, other: Grown) -> tuple[int, int]:
    """(continuations with the same anchor, continuations) of those that did not have to start at the prompt
    in both."""
    pairs = [(a, b) for a, b in zip(tree.anchors, other.anchors, strict=False) if a[0] >= 0 or b[0] >= 0]
    return sum(a == b for a, b in pairs), len(pairs)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for each arm: mean over seeds, and standard error where there are several."""
    arms: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in KEY)
        arms.setdefault(key, []).append(row)
    return [_mean(key, found) for key, found in arms.items()]


def _mean(key: tuple[Any, ...], rows: Sequence[Row]) -> Row:
    mean: Row = dict(zip(KEY, key, strict=True))
    mean["seeds"] = len(rows)
    for name in (*FIGURES, "rifb_flat", "mixed_flat", "rifb_loss_se"):
        values = [row[name] for row in rows if name in row]
        if values:
            mean[name] = statistics.fmean(values)
            if name in FIGURES:
                mean[f"{name}_error"] = _standard_error(values)
    return mean


def find(rows: Sequence[Row], **wanted: Any) -> Row | None:
    """The first row with these values."""
    return next((row for row in rows if all(row.get(name) == value for name, value in wanted.items())), None)
