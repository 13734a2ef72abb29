"""What the terminal shows while role=local trains: one line every few seconds, and how times are written.

    logs/learner.log, logs/allocator.log ──▶ newest numbers ──▶ `0m35s  step 12/60  success 0.52  …`

The numbers come from the `progress` events in the JSON-lines logs. A number that no role has logged is left
out of the line, so that a log without them, or half written, costs the run nothing. Warnings in these logs
are shown too: a run that makes no progress says what it waits for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.config import HELD_OUT
from common.logs import escape

EVENT = "progress"
"""Event name of the log entries that carry the numbers below."""
RESUMED = "resumed"
"""Event name of the entry that says where a learner goes on."""


WARNINGS = ("warning", "error", "critical")


@dataclass(slots=True)
class Tail:
    """The JSON lines that were added to a file since it was last asked."""

    path: Path
    _offset: int = 0

    @classmethod
    def from_here(cls, path: Path) -> Tail:
        """Of what is added from now on."""
        return cls(path, path.stat().st_size if path.is_file() else 0)

    def new_entries(self) -> list[dict[str, Any]]:
        """Complete lines only: one that is being written is read the next time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [entry for line in whole.splitlines() if (entry := _entry(line))]


def _entry(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(slots=True)
class Progress:
    """The newest numbers of a run."""

    steps: int
    tails: dict[str, Tail]
    """Role -> its log."""
    newest: dict[str, float] = field(default_factory=dict)

    def update(self) -> list[str]:
        """Read what the roles have logged since the last time; returns each one's newest error and its newest
        warning after that, if any: what a role says of the remedy must not hide what was wrong."""
        warnings: list[str] = []
        for role, tail in self.tails.items():
            error = warning = ""
            for entry in tail.new_entries():
                if entry.get("event") in (EVENT, RESUMED):
                    self.newest.update({k: v for k, v in entry.items() if isinstance(v, (int, float))})
                if entry.get("level") in WARNINGS:
                    warning = f"{role}: {escape(str(entry.get('message', '')))}"
                    if entry["level"] != "warning":
                        error, warning = warning, ""
            warnings += filter(None, (error, warning))
        return warnings

    def line(self, elapsed_s: float, actors_alive: int, actors: int) -> str:
        """One line for a person."""
        parts = [duration(elapsed_s), f"step {int(self.newest.get('step', 0))}/{self.steps}"]
        for name, words in (
            ("success", "success {:.2f}"),
            ("trees_per_s", "{:.1f} trees/s"),
            ("tokens_per_s", "{:.0f} tokens/s"),
            ("lag", "lag {:.1f}"),
            ("trees_in_flight", "{:.0f} trees in flight"),
        ):
            if name in self.newest:
                parts.append(words.format(self.newest[name]))
        return "  ".join([*parts, f"actors {actors_alive}/{actors}"])


def success_on(split: str) -> str:
    """What a success rate is called: only tasks that no training saw are held out."""
    return "held-out success" if split == HELD_OUT else f"success on the split {split}"


def duration(seconds: float) -> str:
    """`5m12s`."""
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s"
