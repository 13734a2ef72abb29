"""Tables as markdown, numbers as everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import shown


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [list(head), ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return shown(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def plus_minus(pair: Sequence[float] | None, factor: float = 1.0, digits: int = 3) -> str:
    """`0.607 ± 0.012`: a value and its standard error."""
    if pair is None:
        return "–"
    value, error = pair
    return f"{factor * value:.{digits}f} ± {factor * error:.{digits}f}"
