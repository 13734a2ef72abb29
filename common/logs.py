"""Logs: one human line on stderr and one JSON line in `logs/<role>.log` for everything that happened.

    LOG = logging.getLogger("treeward.allocator")
    LOG.warning("lease %s expired", lease, extra=fields("lease_expired", tree=5, number=2))

Event names are stable and may be searched for; the sentence is for people. What models and environments
wrote is data: control characters are escaped, and a line never exceeds `MAX_LINE`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import StorageError

ROOT = "treeward"
MAX_LINE = 8 << 10
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if code != 0x0A}


def setup_logs(
    role: str, file: Path | None, *, peer: str = "", run: str = "", level: int = logging.INFO
) -> logging.Logger:
    """Send everything logged under `treeward` to stderr and, unless None, to `file`; once per process start.

    Raises:
        StorageError: `file` cannot be opened.
    """
    logging.raiseExceptions = False  # a closed stderr or a full disk must not print a traceback per line
    logger = logging.getLogger(ROOT)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    logger.setLevel(level)
    logger.propagate = False
    human = logging.StreamHandler(sys.stderr)
    human.setFormatter(HumanLines(role))
    logger.addHandler(human)
    if file is not None:
        logger.addHandler(_file_handler(file, JsonLines(role, peer, run)))
    return logger


def fields(event: str, /, **values: Any) -> dict[str, Any]:
    """The `extra` of a log call: a stable event name and what it is about, for the JSON line only."""
    return {"event": event, "fields": values}


def _file_handler(file: Path, formatter: logging.Formatter) -> logging.Handler:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write the log {file}: {error.strerror}") from error
    handler.setFormatter(formatter)
    return handler


class HumanLines(logging.Formatter):
    """`12:30:01 allocator  WARNING lease tree=5/lease=2.0 expired`; the level only from WARNING up."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname} " if record.levelno >= logging.WARNING else ""
        clock = f"{datetime.fromtimestamp(record.created):%H:%M:%S}"
        line = f"{clock} {self._role:<9} {level}{escape(record.getMessage())}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line if len(line) <= MAX_LINE else line[: MAX_LINE - 1] + "…"


class JsonLines(logging.Formatter):
    """One JSON object a line: when, level, event, role, peer, run, pid, message, and the call's fields."""

    def __init__(self, role: str, peer: str, run: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "peer": peer, "run": run, "pid": os.getpid()}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "mono": round(time.monotonic(), 3),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", ""),
            **self._fixed,
            "message": record.getMessage()[:MAX_LINE],
        }
        entry.update(getattr(record, "fields", {}))
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[-MAX_LINE:]
        line = json.dumps(entry, default=str)
        if len(line) > 4 * MAX_LINE:
            line = json.dumps({key: str(value)[: MAX_LINE // 8] for key, value in entry.items()})
        return line


def escape(text: str) -> str:
    """`text` on one line, with its control characters made visible, so that it cannot steer a terminal."""
    return text.replace("\n", "\\n").translate(_CONTROL)


class Repeats:
    """Passes one of many equal events per `every_s` and counts the rest. Time is an argument."""

    def __init__(self, every_s: float = 60.0) -> None:
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def allow(self, event: str, now: float) -> int | None:
        """None: say nothing now. Otherwise the number of equal events held back since the last one said."""
        if now - self._last.get(event, float("-inf")) < self._every_s:
            self._held[event] = self._held.get(event, 0) + 1
            return None
        self._last[event] = now
        return self._held.pop(event, 0)
