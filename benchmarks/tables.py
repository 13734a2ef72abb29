"""The tables of `docs/benchmarks.md`, made from the results files: nobody types a measured number.

    python -m benchmarks.tables

Each table stands between `<!-- name -->` and `<!-- /name -->`; the text around them is written by hand. A
test compares the page with what the results files generate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allocation_tables import allocation, frozenlake
from benchmarks.lag_tables import lag_bias
from benchmarks.markdown import table
from benchmarks.results import RESULTS, ROOT, read_results, shown
from benchmarks.speculation_tables import scale, speculation
from common.errors import StorageError
from common.rundir import write_bytes_atomic

DOCS = ROOT / "docs" / "benchmarks.md"
Results = dict[str, Any]


def provenance(found: Results) -> str:
    """One line under each table: how, where and when it was measured."""
    machine, git = found["machine"], found["git"]
    start, end = found["load_average"]["start"][0], found["load_average"]["end"][0]
    return (
        f"`{found['command']}`, {found['date'][:10]}, commit {git['commit'][:12]}"
        f"{' with changes' if git['dirty'] else ''}, {machine['cores']} cores of {machine['cpu']}, "
        f"{machine['memory_gib']} GiB, Python {machine['python']}, torch {machine['torch']}; load average "
        f"{start:.1f} before, {end:.1f} after; {found['seconds'] / 60:.1f} minutes."
    )


# ---------------------------------------------------------------------------------------------- the ring


def ring(found: Results) -> str:
    """Headline of each run, then the waits."""
    names = list(found["headline"])
    rows = [[run["run"], *(run[name] for name in names)] for run in found["runs"]]
    rows.append(["**mean of repeats**", *found["headline"].values()])
    if found["noise"]:
        rows.append(["noise", *(f"{100 * found['noise'][name]:.1f} %" for name in names)])
    parts = [table(["run", *names], rows), ring_waits(found["runs"][0])]
    if found["sensitivity"]:
        before, after = (shown(found["sensitivity"][key]) for key in ("actor_wait", "actor_wait_synchronous"))
        parts.insert(
            1, f"Without slack (`learner.max_policy_lag=0`) `actor_wait` goes from {before} to {after}."
        )
    return "\n\n".join(parts)


def ring_waits(run: Results) -> str:
    """Shares of wall time in the first run."""
    roles = {**run["actors"], "learner": run["learner"], "allocator": run["allocator"]}
    rows = [
        [role, share, f"{100 * value:.1f} %"]
        for role, shares in roles.items()
        for share, value in _sorted(shares)
    ]
    wire = [[path, shown(value / run["tokens"]["trained"])] for path, value in _paths(run["wire"])]
    shares = table(["process", "share of wall time", f"in {run['run']}"], rows)
    return shares + "\n\n" + table(["path", "bytes per trained token"], wire)


def _sorted(shares: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def _paths(wire: dict[str, float]) -> list[tuple[str, float]]:
    return _sorted({path: value for path, value in wire.items() if path != "unmatched_share"})


# ------------------------------------------------------------------------------------------ the controls


def controls(found: Results) -> str:
    """One row for each seed and arm."""
    head = ["seed", "arm", "sampled before", "after", "gain", "greedy before", "after", "gain", "minutes"]
    rows = []
    for run in found["runs"]:
        sampled, greedy = run["sampled"], run["greedy"]
        rows.append(
            [
                str(run["seed"]),
                run["arm"],
                interval(sampled["before"]),
                interval(sampled["after"]),
                interval(sampled["gain"]),
                interval(greedy["before"]),
                interval(greedy["after"]),
                interval(greedy["gain"]),
                f"{run['training_s'] / 60:.1f}",
            ]
        )
    checks = table(
        ["asked", "measured", "holds"],
        [
            [check["asked"], check["measured"], "yes" if check["holds"] else "**no**"]
            for check in found["checks"]
        ],
    )
    return table(head, rows) + "\n\n" + checks


def interval(value: dict[str, float]) -> str:
    """`0.312 [0.284, 0.341]`."""
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


# --------------------------------------------------------------------------------------------- the fleet


def fleet(found: Results) -> str:
    """One row a run."""
    rows = [
        [run["rule"], run["actors"], run["events"], run["seconds"], run["events_per_s"]]
        for run in found["runs"]
    ]
    return table(["rule", "actors", "events", "seconds", "events/s"], rows)


def learner_kills(found: Results) -> str:
    """One row for all kills, and where they landed."""
    headline, moments = found["headline"], found["moments"]
    rows = [[*headline.values(), ", ".join(f"{name} {count}" for name, count in sorted(moments.items()))]]
    return table([*(name.replace("_", " ") for name in headline), "landed"], rows)


def recovery(found: Results) -> str:
    """One row a fleet."""
    names = ("inputs", "replayed", "seconds", "process_s", "whole_journal_s", "pause_ms", "snapshot_mb")
    return table(
        ["actors", *names], [[run["actors"], *(run[name] for name in names)] for run in found["runs"]]
    )


# --------------------------------------------------------------------------------------------- the drift


def drift(found: Results) -> str:
    """One row a pair of runs: success over all updates, distances after the last."""
    rows = [
        [run["pair"], sum(run["success"]) / len(run["success"]), run["weights"][-1], run["apart"][-1]]
        for run in found["runs"]
    ]
    return table(["runs", "difference of success", "weights", "apart"], rows)


# ------------------------------------------------------------------------------------------------ the bias


def bias(found: Results) -> str:
    """One row a rule: each credit with what a shared token is worth, then what stopping paths changes."""
    columns = list(dict.fromkeys((run["credit"], run["node_weight"]) for run in found["runs"]))
    rows = []
    for predictor, rule in dict.fromkeys((run["predictor"], run["rule"]) for run in found["runs"]):
        of_rule = {
            (run["credit"], run["node_weight"]): run
            for run in found["runs"]
            if (run["predictor"], run["rule"]) == (predictor, rule)
        }
        apart = [of_rule[columns[0]][f"run_against_{other}"] for other in ("environment", "rivals")]
        cells = [f"{of_rule[column]['bias_run']:.4f}" for column in columns]
        rows.append([rule, predictor, *cells, *(f"{value:.4f}" for value in apart)])
    heads = [f"{credit}, {weight}" for credit, weight in columns]
    return table(["rule", "predictor", *heads, "against environment", "against rivals"], rows)


# ------------------------------------------------------------------------------------------- the staleness


def staleness(found: Results) -> str:
    """One row an arm: mean over seeds, and the gaps to lag 0, paired by seed."""
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["arm"] == arm]
        cells = [arm, len(runs), f"{_mean(run['updates'] for run in runs):.0f}", f"{_age(runs):.1f}"]
        for mode in ("sampled", "greedy"):
            gap = found["gaps"].get(f"{arm}/{mode}")
            cells.append(f"{_mean(run['after'][mode]['mean'] for run in runs):.3f}")
            bound = f" (at most {gap['bound']:.3f})" if gap and "bound" in gap else ""
            cells.append(f"{gap['mean']:.3f}{bound}" if gap else "–")
        rows.append(cells)
    head = ["arm", "seeds", "updates", "mean age", "sampled", "gap (90 %)", "greedy", "gap (90 %)"]
    asked = [
        [check["asked"], check["measured"], "yes" if check["holds"] else "**no**"]
        for check in found["checks"]
    ]
    return table(head, rows) + "\n\n" + table(["asked", "measured", "holds"], asked)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _age(runs: Sequence[Results]) -> float:
    """Mean age of the tokens trained on, in updates."""
    ages = [(int(age), count) for run in runs for age, count in run["lags"].items()]
    return float(sum(age * count for age, count in ages) / sum(count for _, count in ages))


# ------------------------------------------------------------------------------------- training on trees


def tree_training(found: Results) -> str:
    """One row a sharing: medians over repeats; branch by branch is 1."""
    rows = [
        [
            f"{run['token_ratio']:.2f}",
            run["trees"],
            run["branches"],
            f"{run['speed_up_cpu']:.2f}",
            f"{run['speed_up_wall']:.2f}",
            f"{run['share_of_limit']:.2f}",
            f"{run['null']:.3f}",
            f"{run['memory_ratio']:.2f}",
        ]
        for run in found["runs"]
    ]
    head = ["token ratio (limit)", "trees", "branches", "speed-up, CPU", "wall", "share of limit", "null",
            "memory"]  # fmt: skip
    return table(head, rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "ring": ring,
    "controls": controls,
    "fleet": fleet,
    "allocator_scale": scale,
    "recovery": recovery,
    "learner_kills": learner_kills,
    "speculation": speculation,
    "speculation_ratios": speculation,
    "drift": drift,
    "bias": bias,
    "lag_bias": lag_bias,
    "tree_training": tree_training,
    "staleness": staleness,
    "allocation": allocation,
    "allocation_frozenlake": frozenlake,
}
"""Results file -> its tables."""
MODULES = {
    "fleet": "allocator_fleet",
    "recovery": "allocator_recovery",
    "speculation_ratios": "speculation --ratios",
}
"""Results file -> the benchmark that makes it, where their names differ."""


# ----------------------------------------------------------------------------------------------- the page


def render(text: str, folder: Path = RESULTS) -> str:
    """`text` with every table between its markers made anew.

    Raises:
        StorageError: a marker is missing, or a results file cannot be read.
    """
    for name, make in TABLES.items():
        found = read_results(name, folder) or read_results(f"{name}-quick", folder)
        module = MODULES.get(name, name)
        body = (
            f"{make(found)}\n\n{provenance(found)}"
            if found
            else f"Not measured yet: `python -m benchmarks.{module}`."
        )
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)",
            lambda match, body=body: f"{match[1]}{body}{match[2]}",  # type: ignore[misc]
            text,
            flags=re.DOTALL,
        )
        if count != 1:
            raise StorageError(f"the page must hold the table {name!r} once, between markers, got {count}")
    return text


def update(docs: Path = DOCS, folder: Path = RESULTS) -> None:
    """Write the page's tables. Raises `StorageError`."""
    write_bytes_atomic(docs, render(docs.read_text(encoding="utf-8"), folder).encode())


def update_if_committed(folder: Path) -> None:
    """After a benchmark: results beside the committed ones go into the page, others do not."""
    if folder.absolute() == RESULTS:
        update()


if __name__ == "__main__":
    update()
