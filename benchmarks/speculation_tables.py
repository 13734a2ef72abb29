"""The tables of the speculation and scale benchmarks, for `docs/benchmarks.md`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table

Results = dict[str, Any]
Row = dict[str, Any]


DETAILED = 1_000
"""Cells of as many slots and more have a table of their own."""


def speculation(found: Results) -> str:
    """Overheads of all cells, a table for each large one, and what real processes say."""
    cells = dict.fromkeys((row["slots"], row["ratio"], row["tail"], row["storm"]) for row in found["rows"])
    parts = [overheads(found["rows"])]
    parts += [_cell(found, *cell) for cell in cells if cell[0] >= DETAILED]
    if found["real"]:
        parts.append(_real(found["real"]))
    return "\n\n".join(parts)


def overheads(rows: list[Row]) -> str:
    """One row for each cell and rule, a column for each D."""
    bounds = sorted({row["staleness"] for row in rows if row["rule"] not in ("flat", "null")})
    lines: dict[tuple[Any, ...], dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: (row["slots"], row["ratio"], not row["tail"], row["storm"])):
        kind = "storm" if row["storm"] else "heavy" if row["tail"] else "none"
        key = (f"{row['slots']:,}", f"{row['ratio']:g}", kind, row["rule"])
        if row["rule"] != "flat":
            lines.setdefault(key, {})[row["staleness"]] = _percent(row, "overhead")
    head = ["slots", "trees per slot", "tail", "rule", *(f"D = {bound}" for bound in bounds)]
    body = [
        [*key[:3], "flat, other prompts" if key[3] == "null" else key[3], *(by.get(d, "") for d in bounds)]
        for key, by in lines.items()
    ]
    return "Overhead:\n\n" + table(head, body)


def _cell(found: Results, slots: int, ratio: float, tail: bool, storm: bool) -> str:
    rows = [
        row
        for row in found["rows"]
        if (row["slots"], row["ratio"], row["tail"], row["storm"]) == (slots, ratio, tail, storm)
    ]
    where = f"**{slots:,} slots, {ratio:g} trees per slot, {'heavy tails' if tail else 'no tail'}**"
    weather = ", with faults and a policy that moves" if storm else ""
    seeds = min(row["seeds"] for row in rows)  # controls come once with each rule
    head = ["rule", "D", "overhead", "RIFB lost", "RIFB", "mixed", "agreement", "idle", "wasted", "revoked"]
    lines = [_line(found, row) for row in sorted(rows, key=_order)]
    return f"{where}{weather}; {seeds} {'seeds' if seeds > 1 else 'seed'}:\n\n" + table(head, lines)


def _order(row: Row) -> tuple[int, str, int]:
    """Flat sampling and its repeat first."""
    rank = {"flat": 0, "null": 1}.get(row["rule"], 2)
    return rank, row["rule"], row["staleness"]


def _line(found: Results, row: Row) -> list[object]:
    chosen = found["defaults"].get(row["rule"]) == row["staleness"]
    searching = "rifb" in row
    return [
        {"null": "flat, other prompts"}.get(row["rule"], row["rule"]),
        "–" if row["rule"] in ("flat", "null") else f"**{row['staleness']}**" if chosen else row["staleness"],
        _percent(row, "overhead"),
        _percent(row, "rifb_loss", "rifb_loss_se") if searching else "–",
        f"{row['rifb']:.3f} (flat {row['rifb_flat']:.3f})" if searching else "–",
        f"{row['mixed']:.3f} (flat {row['mixed_flat']:.3f})" if searching else "–",
        _percent(row, "agreement") if searching else "–",
        _percent(row, "idle"),
        _percent(row, "wasted"),
        _percent(row, "revoked"),
    ]


def _percent(row: Row, name: str, within: str = "") -> str:
    """With the standard error over seeds; of one seed, with that over its prompts, where it has one."""
    known = f"{name}_error" if row["seeds"] > 1 else within
    error = f" ± {100 * row[known]:.1f}" if known in row else ""
    return f"{100 * row[name] + 0.0:.1f}{error} %".replace("-0.0", "0.0")


def _real(runs: list[Row]) -> str:
    rows = [
        [run["arm"], run["rule"], run["staleness"], run["tokens_per_s"], f"{100 * run['overhead']:.1f} %"]
        for run in runs
    ]
    return "Real processes:\n\n" + table(["arm", "rule", "D", "tokens/s", "overhead"], rows)


def scale(found: Results) -> str:
    """One row a cell."""
    head = ["part", "rule", "anchors", "in a tree", "actors", "µs per grant", "grants/s", "bytes per anchor"]
    rows = [
        [
            run["part"] + (" (by the clock)" if run["journal"] else ""), run["rule"], f"{run['anchors']:,}",
            run["anchors"] / run["trees"], f"{run['actors']:,}", run["us_per_grant"],
            f"{run['grants_per_s']:,.0f}", run["bytes_per_anchor"],
        ]
        for run in found["runs"]
    ]  # fmt: skip
    return table(head, rows)
