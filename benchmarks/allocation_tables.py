"""The tables of the allocation benchmarks, for `docs/benchmarks.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.allocation_report import INFOTREE, TRACE, as_published
from benchmarks.markdown import plus_minus, table

Results = dict[str, Any]
Row = dict[str, Any]
COMPOSITIONS = (
    ("A", "nothing", "flat", "fixed"),
    ("A", "Tree-GRPO's sharing", "random", "fixed"),
    ("A", "TRACE's roots", "flat", "trace_roots"),
    ("A", "TRACE's roots, Tree-GRPO's sharing", "random", "trace_roots"),
    ("A", "TRACE's prefixes", "trace", "fixed"),
    ("A", "TRACE's roots and prefixes", "trace", "trace_roots"),
    ("C", "nothing", "flat", "fixed"),
    ("C", "InfoTree's budget", "flat", "adaptive"),
    ("C", "InfoTree's budget, Tree-GRPO's sharing", "random", "adaptive"),
    ("C", "InfoTree's rule", "uucb", "fixed"),
    ("C", "InfoTree's rule and budget", "uucb", "adaptive"),
)
"""Population, what is put together, and as which rule and budget."""


def allocation(found: Results) -> str:
    """The comparison with the papers, then what it rests on."""
    parts = [checks(found), *(arms(found, name) for name in found["populations"])]
    parts += [predictors(found), compositions(found)]
    parts += [otherwise(found)] if found["variants"] else []
    parts += [more_or_less(found)] if not all(as_published(row) for row in found["rows"]) else []
    parts += [grid(found)] if found["grid"] else []
    return "\n\n".join(part for part in parts if part)


def checks(found: Results) -> str:
    """What the papers report, and what was measured."""
    rows = [
        [check["asked"], check["measured"], "yes" if check["holds"] else "**no**"]
        for check in found["checks"]
    ]
    return table(["asked", f"measured ({found['seeds']} seeds, mean ± standard error)", "holds"], rows)


def arms(found: Results, population: str) -> str:
    """Every rule and budget of a population, with the predictor that learns."""
    world = found["populations"][population]
    lines = []
    for row in found["rows"]:
        known = row["population"] == population and row["predictor"] in ("shared", "none")
        control = row["predictor"] == "none" and (
            row["rule"] in ("uucb", "trace") or row["budget"] != "fixed"
        )
        if known and not control and row["accounting"] == "continuations" and as_published(row):
            lines.append([row["rule"], row["budget"], *_equal(row), *_tokens(found, row)])
    head = ["rule", "budget", "mixed", "RIFB", "contrast: lift"]
    head += ["continuations", "mixed", "RIFB", "anchors", "contrast", "lift", "lift, paired"]
    title = (
        f"**Population {population}** ({world['source']}; {100 * world['flat_rate']:.1f} % with "
        f"{world['group']} continuations). First at equal continuations, then, from the sixth column, at "
        "equal tokens:"
    )
    return f"{title}\n\n{table(head, lines)}" if lines else ""


def _equal(row: Row) -> list[str]:
    lift = plus_minus(row["contrast_lift_exact"], digits=2)
    return [plus_minus(row["mixed"]), plus_minus(row["rifb"]), lift]


def _tokens(found: Results, row: Row) -> list[str]:
    """The same arm at equal tokens."""
    twin = _twin(found, row)
    if twin is None:
        return ["–"] * 7
    names = ("mixed", "rifb", "anchor_contrast", "contrast")
    lifts = [plus_minus(twin[name], digits=2) for name in ("contrast_lift_exact", "contrast_lift")]
    size = twin["sizes"][0] * (1 - twin["share_of_larger"]) + twin["sizes"][1] * twin["share_of_larger"]
    return [f"{size:.1f}", *(plus_minus(twin[name]) for name in names), *lifts]


def _twin(found: Results, row: Row) -> Row | None:
    keys = ("population", "rule", "budget", "predictor", "overhead", "candidates")
    others = (each for each in found["rows"] if each["accounting"] == "tokens")
    return next((each for each in others if all(each[key] == row[key] for key in keys)), None)


def predictors(found: Results) -> str:
    """What is known of the prefixes, and what that is worth."""
    lines = []
    order = {name: place for place, name in enumerate(("none", "noise", "history"))}
    rows = [row for row in found["rows"] if row["rule"] in ("trace", "uucb") and as_published(row)]
    arms_of = dict.fromkeys((row["population"], row["rule"], row["budget"]) for row in rows)
    for arm in arms_of:
        of_arm = [row for row in rows if (row["population"], row["rule"], row["budget"]) == arm]
        equal = [row for row in of_arm if row["accounting"] == "continuations"]
        if len(equal) < 2:
            continue
        for row in sorted(equal, key=lambda row: (order.get(row["predictor"], 3), row["predictor"])):
            twin = _twin(found, row)
            over = [twin["contrast_lift_exact"], twin["contrast_over_random"]] if twin else [None, None]
            lifts = [plus_minus(pair, digits=2) for pair in (row["contrast_lift_exact"], *over)]
            lines.append([arm[0], f"{arm[1]} × {arm[2]}", row["predictor"], _auc(found, row), *lifts])
    head = ["population", "arm", "predictor", "AUC at roots", "contrast: lift at equal continuations"]
    return table([*head, "at equal tokens", "over random, equal tokens"], lines) if lines else ""


def _auc(found: Results, row: Row) -> str:
    """Of the predictor at roots that nobody selected: by construction, or as measured under flat sampling."""
    known = row["predictor"]
    if known == "oracle":
        return f"{found['populations'][row['population']]['ceiling_auc']:.3f}"
    if known[0].isdigit():
        return f"{float(known):.3f}"
    if known == "shared":
        flat = (each for each in found["rows"] if (each["rule"], each["budget"]) == ("flat", "fixed"))
        seen = [each["auc_roots"] for each in flat if each["population"] == row["population"]]
        return f"{seen[0]:.3f}" if seen and seen[0] is not None else "–"
    return "0.500" if known in ("none", "noise", "history") else "–"


def compositions(found: Results) -> str:
    """Parts of the papers' methods put together, at equal tokens."""
    lines = []
    for population, what, rule, budget in COMPOSITIONS:
        row = next((each for each in found["rows"] if _is_composed(each, population, rule, budget)), None)
        if row is not None:
            lift = plus_minus(row["contrast_lift_exact"], digits=2)
            values = [plus_minus(row["mixed"]), plus_minus(row["rifb"]), lift]
            lines.append([population, what, f"{rule} × {budget}", *values])
    return table(["population", "put together", "as", "mixed", "RIFB", "contrast: lift"], lines)


def otherwise(found: Results) -> str:
    """The arms of the papers where a constant of ours is another one."""
    lines = []
    for row in found["variants"]:
        if row["rule"] in ("trace", "uucb") and row["accounting"] == "tokens":
            lifts = [
                plus_minus(row[name], digits=2) for name in ("contrast_lift_exact", "contrast_over_random")
            ]
            arm, gain = f"{row['rule']} × {row['budget']}", plus_minus(row["mixed_gain_exact"], 100, 1)
            lines.append([row["population"], arm, row["predictor"], *lifts, gain])
    head = ["population", "arm", "predictor", "contrast: lift", "over random", "mixed − flat's, points"]
    title = "The same with other values of constants of ours (defaults: reveal 0.25, prompt_noise 2):"
    return f"{title}\n\n{table(head, lines)}"


def _is_composed(row: Row, population: str, rule: str, budget: str) -> bool:
    """At equal tokens, with the predictor that learns wherever one is asked."""
    known = "none" if (rule, budget) == ("random", "fixed") else "shared"
    wanted = (population, rule, budget, known, "tokens")
    names = ("population", "rule", "budget", "predictor", "accounting")
    return tuple(row[name] for name in names) == wanted and as_published(row)


def more_or_less(found: Results) -> str:
    """InfoTree's budget with more to spend, and TRACE's with other pools."""
    spent, pools = [], []
    for row in found["rows"]:
        arm, known = (row["rule"], row["budget"]), row["predictor"]
        if row["accounting"] != "continuations" or known not in ("shared", "oracle"):
            continue
        if arm == INFOTREE and row["population"] == "C":
            share, gain = row["leaves_ratio"] - 1, plus_minus(row["mixed_gain_exact"], 100, 1)
            spent.append([known, f"{row['overhead']:g}", f"{share:.3f}", plus_minus(row["mixed"]), gain])
        if arm == TRACE and row["population"] != "C":
            lift = plus_minus(row["contrast_lift_exact"], digits=2)
            pools.append(
                [row["population"], known, str(row["candidates"]), plus_minus(row["contrast"]), lift]
            )
    return "\n\n".join(
        (
            "InfoTree's rule and budget on C with more to spend, continuations beyond 16 included:",
            table(
                ["predictor", "overhead allowed", "spent", "mixed", "gain over flat, points"], sorted(spent)
            ),
            "TRACE's rule and budget with other pools, at equal continuations:",
            table(["population", "predictor", "candidates a place", "contrast", "lift"], sorted(pools)),
        )
    )


def grid(found: Results) -> str:
    """The grid of weights in one sentence."""
    of_grid = found["grid"]
    *best, value = of_grid["best"]
    values = [point[3] for point in of_grid["points"]]
    default = next(point[3] for point in of_grid["points"] if point[:3] == [1.0, 1.0, 1.0])
    return (
        "Grid of weights of `uucb` (value, exploration, entropy: each "
        f"{', '.join(_times(of_grid['factors']))} times its default; {len(values)} points, "
        f"{of_grid['distinct']} of them distinct): {100 * of_grid['plateau']:.0f} % of the points have a "
        "mixed-outcome ratio within 5 % of the best one (InfoTree: more than three quarters). Best: "
        f"{value:.3f} at {', '.join(_times(best))}; defaults: {default:.3f}; worst: {min(values):.3f}."
    )


def _times(factors: Sequence[float]) -> list[str]:
    return [f"{factor:g}" for factor in factors]


def frozenlake(found: Results) -> str:
    """One row a policy and arm."""
    lines = []
    for row in found["rows"]:
        values = [plus_minus(row[name]) for name in ("mixed", "rifb", "contrast", "anchor_contrast")]
        lifts = [
            plus_minus(row.get(f"contrast_over_{base}"), digits=2)
            for base in ("flat_leaves", "flat_tokens", "random_tokens")
        ]
        gain = plus_minus(row.get("mixed_gain_flat_tokens"), 100, 1)
        size, cost = (f"{row[name][0]:.1f}" for name in ("leaves", "tokens"))
        lines.append([row["policy"], row["arm"], size, cost, *values, *lifts, gain])
    head = ["policy", "arm", "continuations", "tokens", "mixed", "RIFB", "contrast", "anchors"]
    head += ["contrast over flat, equal continuations", "equal tokens", "over random, equal tokens"]
    return table([*head, "mixed − flat's at equal tokens, points"], lines)
