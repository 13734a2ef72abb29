"""The tables of `benchmarks.lag_bias`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table

Results = dict[str, Any]
CONTROLS = {"product": "control: ratio of the trajectory", "untruncated": "control: V-trace, ρ̄ = c̄ = ∞"}


def lag_bias(found: Results) -> str:
    """How far apart the policies are, then one row a method: both errors at each lag. Losses that do not
    differ beside a weight share a row."""
    lags = [entry["lag"] for entry in found["distances"]]
    far = [
        [name, *(f"{entry[key]:.3f}" for entry in found["distances"])]
        for key, name in (
            ("moved", "mean of \\|log π / μ\\| of a token"),
            ("kl", "KL(μ ‖ π) of a trajectory"),
            ("ess", "effective sample size, by the ratio of the trajectory"),
        )
    ]
    parts = [table(["lag", *map(str, lags)], far)]
    for key, head in (("error", "against ∇V(π)"), ("local_error", "against the local gradient")):
        parts.append(table([head, "weight", *(f"lag {lag}" for lag in lags)], rows(found["runs"], key)))
    return "\n\n".join(parts)


def rows(runs: list[Results], key: str) -> list[list[str]]:
    """A row for each different line of figures under a weight."""
    lines: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        credit = str(run["credit"])
        name = str(run["loss"]) if credit == "granted" else CONTROLS.get(credit, credit)
        cells = f"{run[key]:.3f}" + (f" ({run['cosine']:.2f})" if key == "error" else "")
        lines.setdefault((name, run["weight"]), []).append(cells)
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (name, weight), line in lines.items():
        together.setdefault((weight, tuple(line)), []).append(name)
    return [[", ".join(names), weight, *line] for (weight, line), names in together.items()]
