"""Metrics that the tracking server has not taken yet, kept in a file: one JSON row a line.

    append ──▶ spool.jsonl ──peek──▶ server ──taken──▶ forgotten

A row leaves the file when the server has it, so that a crash in between repeats rows and loses none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from common.tracking import Row

FILE_NAME = "spool.jsonl"
MAX_BYTES = 256 << 20
"""About two million rows: weeks of outage. What no longer fits is dropped and counted."""


class Spool:
    """A queue of rows in `path`. Owned by one process; rows that an earlier one left are taken up."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._peeked = 0
        self._size = path.stat().st_size if path.exists() else 0
        self.dropped = 0
        """Rows lost because the file is full, the disk refuses, or a line cannot be read."""

    def __bool__(self) -> bool:
        return self._offset < self._size

    def append(self, rows: Iterable[Row]) -> None:
        """Add `rows` at the end. Never raises: a full disk drops them and counts."""
        lines = [json.dumps(row) + "\n" for row in rows]
        data = "".join(lines).encode()
        try:
            if self._size + len(data) > MAX_BYTES:
                raise OSError("the spool is full")
            with self._path.open("ab") as file:
                if file.tell() != self._size:
                    file.truncate(self._size)  # half a line of a write that failed
                file.write(data)
            self._size += len(data)
        except OSError:
            self.dropped += len(lines)

    def peek(self, count: int) -> list[Row]:
        """At most `count` rows from the front; they stay until `taken`."""
        rows: list[Row] = []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while len(rows) < count and file.tell() < self._size:
                row = _row(file.readline())
                if row is None:
                    self.dropped += 1
                else:
                    rows.append(row)
            self._peeked = file.tell()
        return rows

    def taken(self) -> None:
        """Forget what the last `peek` returned; an empty spool leaves no file."""
        self._offset = self._peeked
        if self._offset >= self._size:
            self._path.unlink(missing_ok=True)
            self._offset = self._peeked = self._size = 0


def _row(line: bytes) -> Row | None:
    try:
        name, value, step, when_ms = json.loads(line)
        return Row(str(name), float(value), int(step), int(when_ms))
    except (ValueError, TypeError):
        return None
