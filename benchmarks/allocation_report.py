"""From measured arms to what is reported: values and lifts with their standard errors, checks, headline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.allocation_arms import CANDIDATES
from benchmarks.allocation_runs import Matched
from benchmarks.contrast import Sums
from benchmarks.population import POPULATIONS
from benchmarks.population_predictors import root_auc

METRICS = ("mixed", "contrast", "rifb", "anchor_contrast")
MIN_SEEDS = 5
"""With fewer, a slope fitted to them would be luck itself."""
Pair = tuple[float, float]
"""A value and its standard error."""
Point = tuple[float, float, float]
"""Of a grid of weights: value, exploration, entropy."""
Row = Mapping[str, Any]
"""See `row`."""


def mean_of(values: Sequence[float]) -> Pair:
    """Mean over seeds and its standard error; NaN-free: one seed has the error 0."""
    if len(values) < 2:
        return values[0], 0.0
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def lift_of(values: Sequence[float], base: Sequence[float]) -> Pair:
    """Ratio of the means over paired seeds, with its standard error by the delta method.

    Not the mean of the ratios: with few prompts a seed that ratio is too high.
    """
    bottom = statistics.fmean(base)
    ratio = statistics.fmean(values) / bottom
    rest = [(value - ratio * other) / bottom for value, other in zip(values, base, strict=True)]
    return ratio, mean_of(rest)[1]


def gain_of(values: Sequence[float], base: Sequence[float]) -> Pair:
    """Mean paired difference and its standard error."""
    return mean_of([value - other for value, other in zip(values, base, strict=True)])


def without_luck(values: Sequence[float], base: Sequence[float], known: float) -> Pair:
    """Mean of `values` over seeds, freed from the luck that the baseline shows to have had.

    A control variate: the baseline's expectation is `known`, so mean − β · (mean of base − known) estimates
    the same as the mean, for any β; the best one, cov / var, is taken from the seeds. Where prompts and draws
    are shared with the baseline that is nearly a paired comparison, where they are not, none.
    """
    count = len(values)
    middle, bottom = statistics.fmean(values), statistics.fmean(base)
    spread = math.fsum((other - bottom) ** 2 for other in base)
    if count < MIN_SEEDS or spread == 0:
        return mean_of(values)
    both = math.fsum((v - middle) * (b - bottom) for v, b in zip(values, base, strict=True))
    beta = both / spread
    rest = math.fsum((v - middle - beta * (b - bottom)) ** 2 for v, b in zip(values, base, strict=True)) / (
        count - 2
    )
    return middle - beta * (bottom - known), math.sqrt(rest / count)


def row(found: Matched, base: Sequence[Sums], accounting: str, flat_rate: float) -> dict[str, Any]:
    """What is reported of an arm beside the baseline's sums, seed by seed, and its exact rate."""
    sums, arm = found.sums(), found.low.arm
    contrast, mixed = (
        without_luck(_values(sums, name), _values(base, name), flat_rate) for name in ("contrast", "mixed")
    )
    return {
        "population": found.low.population,
        "rule": arm.rule,
        "budget": arm.budget,
        "predictor": arm.predictor,
        "overhead": arm.overhead if arm.budget == "adaptive" else None,
        "candidates": arm.candidates if arm.budget == "trace_roots" else None,
        "accounting": accounting,
        "sizes": [found.low.size, found.high.size],
        "share_of_larger": found.share,
        "auc_roots": found.low.auc_roots,
        "auc_prefixes": found.low.auc_prefixes,
        "leaves_ratio": _ratio(sums, base, "leaves"),
        "tokens_ratio": _ratio(sums, base, "tokens"),
        "tokens_ratio_of_sizes": [
            _ratio(measured.sums, base, "tokens") for measured in (found.low, found.high)
        ],
        **{name: mean_of(_values(sums, name)) for name in METRICS},
        **{f"{name}_lift": lift_of(_values(sums, name), _values(base, name)) for name in METRICS},
        "contrast_lift_exact": (contrast[0] / flat_rate, contrast[1] / flat_rate),
        "mixed_gain_exact": (mixed[0] - flat_rate, mixed[1]),
        "mixed_gain": gain_of(_values(sums, "mixed"), _values(base, "mixed")),
    }


def _values(sums: Sequence[Sums], name: str) -> list[float]:
    return [each.ratios()[name] for each in sums]


def _ratio(sums: Sequence[Sums], base: Sequence[Sums], name: str) -> float:
    mine, other = (
        math.fsum(getattr(s, name) for s in of) / math.fsum(s.prompts for s in of) for of in (sums, base)
    )
    return mine / other


# ---------------------------------------------------------------------------------------------- the grid


PLATEAU = 0.05
"""A point is on the plateau where its mixed-outcome ratio is at most this share below the best point's."""


def plateau(values: Mapping[Point, float]) -> float:
    """Share of the points that are on it."""
    best = max(values.values())
    return sum(value >= (1 - PLATEAU) * best for value in values.values()) / len(values)


# --------------------------------------------------------------------------------------- the comparison


PAPERS = {"A": 2.26, "B": 1.72}
"""TRACE's lift of the effective contrast: 26.8 to 60.6 % (8B) and 34.7 to 59.7 % (14B)."""
GAIN, OVERHEAD, ON_PLATEAU = 0.182, 0.05, 0.75
"""InfoTree's gain of mixed outcomes (58.1 to 76.3 %), its overhead, its plateau."""
ORACLE = 1.5
"""What an oracle must reach for a comparison with TRACE to mean anything."""
FLAT, TRACE, INFOTREE = ("flat", "fixed"), ("trace", "trace_roots"), ("uucb", "adaptive")


def as_published(found: Row) -> bool:
    """Whether a budget has no more to spend than its paper's, and a pool the usual size."""
    return found["overhead"] in (None, OVERHEAD) and found["candidates"] in (None, CANDIDATES)


def find(
    rows: Sequence[Row], population: str, arm: tuple[str, str], predictor: str, accounting: str
) -> Row | None:
    """The row of an arm (rule and budget); None where it was not measured."""
    wanted = (population, *arm, predictor, accounting)
    keys = ("population", "rule", "budget", "predictor", "accounting")
    found = (each for each in rows if as_published(each))
    return next((each for each in found if tuple(each[key] for key in keys) == wanted), None)


def needed_auc(
    rows: Sequence[Row], population: str, arm: tuple[str, str], metric: str, wanted: float
) -> float | None:
    """Area under the ROC curve at roots from which an arm would reach `wanted` at equal tokens, interpolated
    between the blurred predictors and the oracle; None where it lies outside of what they reach."""
    found = [
        (_auc_of(population, each["predictor"]), float(each[metric][0]))
        for each in rows
        if (each["population"], each["rule"], each["budget"]) == (population, *arm)
        and each["accounting"] == "tokens"
        and as_published(each)
        and (each["predictor"] == "oracle" or each["predictor"][0].isdigit())
    ]
    for (low, below), (high, above) in pairwise(sorted(found)):
        if below < wanted <= above:
            return low + (high - low) * (wanted - below) / (above - below)
    return None


def _auc_of(population: str, predictor: str) -> float:
    return root_auc(POPULATIONS[population], 0.0) if predictor == "oracle" else float(predictor)


def learned_auc(rows: Sequence[Row], population: str) -> float | None:
    """Of the predictor that learns, at roots under flat sampling, where nobody selects them."""
    flat = find(rows, population, FLAT, "shared", "continuations")
    return flat["auc_roots"] if flat else None


def headline(rows: Sequence[Row]) -> dict[str, float]:
    """See `benchmarks.allocation`; what was not measured is left out."""
    values: dict[str, float] = {}
    trace = find(rows, "A", TRACE, "shared", "tokens")
    if trace is not None:
        values["contrast_lift"] = trace["contrast_lift_exact"][0]
    tree, paid = (find(rows, "C", INFOTREE, "shared", how) for how in ("tokens", "continuations"))
    if tree is not None and paid is not None:
        values["mixed_gain_points"] = 100 * tree["mixed_gain_exact"][0]
        values["budget_overhead"] = paid["leaves_ratio"] - 1
    noise = find(rows, "A", TRACE, "noise", "tokens")
    if noise is not None:
        values["noise_lift"] = noise["contrast_over_random"][0] - 1
    return values


def checks(rows: Sequence[Row], grid: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was asked for, with what was measured and whether it holds."""
    found = [check for name in PAPERS for check in _trace_checks(rows, name)] + _infotree_checks(rows)
    if grid:
        asked = f"grid of weights: at least {ON_PLATEAU:g} within {100 * PLATEAU:g} % of the best"
        found.append(_check(asked, f"{grid['plateau']:.3f}", grid["plateau"] >= ON_PLATEAU))
    return found


def _trace_checks(rows: Sequence[Row], name: str) -> list[dict[str, Any]]:
    found = []
    noise, oracle, shared = (
        find(rows, name, TRACE, each, "tokens") for each in ("noise", "oracle", "shared")
    )
    if noise is not None:
        lift, error = noise["contrast_over_random"]
        holds = lift - 1 <= 2 * error
        found.append(_check(f"{name}: noise gives no lift over random", _pair(lift - 1, error), holds))
    if oracle is not None:
        lift, error = oracle["contrast_lift_exact"]
        found.append(_check(f"{name}: the oracle lifts above {ORACLE}", _pair(lift, error), lift > ORACLE))
    if shared is not None:
        lift, error = shared["contrast_lift_exact"]
        asked = f"{name}: TRACE lifts contrast by {PAPERS[name]}"
        known = _known(rows, name, TRACE, "contrast_lift_exact", PAPERS[name])
        found.append(_check(asked, _pair(lift, error) + known, lift >= PAPERS[name]))
    return found


def _known(rows: Sequence[Row], name: str, arm: tuple[str, str], metric: str, wanted: float) -> str:
    """How good the predictor is, and how good it would have to be."""
    auc, needed = learned_auc(rows, name), needed_auc(rows, name, arm, metric, wanted)
    text = f", the predictor's AUC at roots is {auc:.3f}" if auc else ""
    return text + (f"; a calibrated one needs {needed:.3f}" if needed else "")


def _infotree_checks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found = []
    for accounting in ("continuations", "tokens"):
        tree = find(rows, "C", INFOTREE, "shared", accounting)
        if tree is not None:
            gain, error = tree["mixed_gain_exact"]
            asked = f"C: InfoTree gains {100 * GAIN:.1f} points of mixed outcomes, equal {accounting}"
            known = _known(rows, "C", INFOTREE, "mixed_gain_exact", GAIN) if accounting == "tokens" else ""
            found.append(_check(asked, _pair(100 * gain, 100 * error) + known, gain >= GAIN))
    paid = find(rows, "C", INFOTREE, "shared", "continuations")
    if paid is not None:
        overhead = paid["leaves_ratio"] - 1
        found.append(_check(f"C: overhead below {OVERHEAD:g}", f"{overhead:.3f}", overhead < OVERHEAD))
    return found


def _pair(value: float, error: float) -> str:
    return f"{value:.3f} ± {error:.3f}"


def _check(asked: str, measured: str, holds: bool) -> dict[str, Any]:
    return {"asked": asked, "measured": measured, "holds": bool(holds)}
