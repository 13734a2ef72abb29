"""From episodes to gains: success before and after on the same maps, and how sure one can be.

Two policies are compared map by map, so a gain is the mean of paired differences, each −1, 0 or 1. Its
interval is the percentile bootstrap over maps (Efron 1979): maps are drawn with replacement, the gain taken
of each drawing. Success rates carry Wilson's interval, as `role=eval` reports it. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MODES = ("sampled", "greedy")
DRAWS = 10_000
LEVEL = 95.0
"""Percent that an interval covers."""


def bits(result: Mapping[str, Any]) -> str:
    """Success of each task of an evaluation, in their order: `0110…`."""
    episodes = sorted(result["per_task"], key=lambda episode: int(episode["task"]))
    return "".join("1" if episode["success"] else "0" for episode in episodes)


def compact(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of an evaluation: the rate with its interval, and every episode's success, by mode."""
    return {mode: _compact(evaluation[mode]) for mode in MODES}


def _compact(result: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"mean": result["success"], "low": result["low"], "high": result["high"]}
    return {**kept, "mean_turns": result["mean_turns"], "episodes": bits(result)}


def gain(before: str, after: str, *, draws: int = DRAWS, seed: int = 0) -> dict[str, float]:
    """Mean paired difference with its bootstrapped interval.

    Example: `gain("0101", "0111")["mean"] == 0.25`.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"before and after must be the same maps, got {len(before)} and {len(after)}")
    differences = [int(b) - int(a) for a, b in zip(before, after, strict=True)]
    count = len(differences)
    shares = [differences.count(value) / count for value in (-1, 0, 1)]
    # Drawing maps with replacement draws how many of each difference: a multinomial.
    drawn = np.random.default_rng(seed).multinomial(count, shares, size=draws)
    low, high = np.percentile((drawn[:, 2] - drawn[:, 0]) / count, [50 - LEVEL / 2, 50 + LEVEL / 2])
    return {"mean": sum(differences) / count, "low": float(low), "high": float(high)}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Of two compact evaluations: before, after and gain, by mode."""
    return {
        mode: {
            "before": before[mode],
            "after": after[mode],
            "gain": gain(before[mode]["episodes"], after[mode]["episodes"]),
        }
        for mode in MODES
    }


def mean_gain(runs: Sequence[Mapping[str, Any]], arm: str, mode: str = "sampled") -> float | None:
    """Mean over seeds of the gain of an arm; None where it was not run."""
    found = [float(run[mode]["gain"]["mean"]) for run in runs if run["arm"] == arm]
    return sum(found) / len(found) if found else None
