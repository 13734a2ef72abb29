"""Logs: a line for people, a line for programs, and nothing a model wrote can steer a terminal."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import StorageError
from common.logs import MAX_LINE, Repeats, fields, setup_logs

LOG = logging.getLogger("treeward.test")


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    logger = logging.getLogger("treeward")
    before = (list(logger.handlers), logger.level, logger.propagate, logging.raiseExceptions)
    yield
    for handler in logger.handlers:
        handler.close()
    logger.handlers, logger.level, logger.propagate, logging.raiseExceptions = before


@pytest.fixture(name="file")
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "allocator.log"


def entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_an_event_is_one_human_line_and_one_json_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("allocator", file, peer="a/1", run="run-7")
    LOG.warning("lease %s expired", "tree=5/lease=2.0", extra=fields("lease_expired", tree=5))
    human = capsys.readouterr().err
    assert human.count("\n") == 1
    assert "allocator WARNING lease tree=5/lease=2.0 expired" in human
    (entry,) = entries(file)
    expected = {
        "level": "warning",
        "event": "lease_expired",
        "role": "allocator",
        "peer": "a/1",
        "run": "run-7",
        "tree": 5,
    }
    assert entry | expected == entry
    assert entry["message"] == "lease tree=5/lease=2.0 expired"
    assert {"ts", "mono", "pid"} <= set(entry)


def test_control_characters_and_new_lines_cannot_forge_lines_or_colours(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logs("actor", file)
    LOG.info("the model wrote %s", "\x1b[31mred\nWARNING forged\r\x9b")
    human = capsys.readouterr().err
    assert human.count("\n") == 1
    assert not any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in human.rstrip("\n"))
    assert len(entries(file)) == 1


def test_no_line_is_longer_than_the_limit(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("actor", file)
    LOG.info("x" * 10_000_000, extra=fields("long", text="y" * 10_000_000))
    assert len(capsys.readouterr().err) <= MAX_LINE + 1
    assert file.stat().st_size <= 5 * MAX_LINE
    assert entries(file)[0]["event"] == "long"


def test_an_exception_keeps_its_traceback_in_the_file(file: Path) -> None:
    setup_logs("learner", file)
    try:
        raise ValueError("boom")
    except ValueError:
        LOG.exception("the step failed")
    assert "ValueError: boom" in entries(file)[0]["traceback"]


def test_values_that_json_does_not_know_are_written_as_text(file: Path) -> None:
    setup_logs("learner", file)
    LOG.info("odd", extra=fields("odd", path=Path("a"), data=b"\xff"))
    assert entries(file)[0]["path"] == "a"


def test_setting_up_again_replaces_the_handlers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logs("learner", file)
    setup_logs("learner", file)
    LOG.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert len(entries(file)) == 1


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where a folder belongs")
    with pytest.raises(StorageError, match="cannot write the log"):
        setup_logs("learner", tmp_path / "logs" / "learner.log")


def test_a_closed_stderr_costs_neither_the_process_nor_the_file(file: Path) -> None:
    program = (
        "import sys, os, logging, pathlib; from common.logs import setup_logs\n"
        "setup_logs('actor', pathlib.Path(sys.argv[1])); os.close(2)\n"
        "logging.getLogger('treeward.x').info('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    assert done.returncode == 0
    assert entries(file)[0]["message"] == "still here"


def test_repeats_are_said_once_per_interval_with_the_number_held_back() -> None:
    repeats = Repeats(every_s=60.0)
    assert repeats.allow("down", 0.0) == 0
    assert [repeats.allow("down", now) for now in (1.0, 30.0, 59.0)] == [None, None, None]
    assert repeats.allow("other", 30.0) == 0
    assert repeats.allow("down", 60.0) == 3
    assert repeats.allow("down", 120.0) == 0
