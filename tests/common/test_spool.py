"""The spool: no row is lost or forgotten before the server has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common import spool as module
from common.spool import Spool
from common.tracking import Row

ROWS = [Row("learner/loss", 0.5, step, 1_700_000_000_000 + step) for step in range(10)]


@pytest.fixture(name="path")
def spool_path(tmp_path: Path) -> Path:
    return tmp_path / "spool.jsonl"


def test_rows_come_back_in_order_and_leave_only_when_taken(path: Path) -> None:
    spool = Spool(path)
    assert not spool
    spool.append(ROWS)
    assert spool.peek(4) == ROWS[:4]
    assert spool.peek(4) == ROWS[:4]
    spool.taken()
    assert spool.peek(100) == ROWS[4:]
    spool.taken()
    assert not spool
    assert not path.exists()


def test_rows_that_arrive_between_peek_and_taken_are_kept(path: Path) -> None:
    spool = Spool(path)
    spool.append(ROWS[:2])
    assert spool.peek(10) == ROWS[:2]
    spool.append(ROWS[2:])
    spool.taken()
    assert spool.peek(10) == ROWS[2:]


def test_a_later_process_takes_up_what_an_earlier_one_left_repeats_included(path: Path) -> None:
    earlier = Spool(path)
    earlier.append(ROWS)
    earlier.peek(3)
    earlier.taken()
    assert Spool(path).peek(100) == ROWS


def test_half_a_line_left_by_a_kill_is_counted_and_skipped(path: Path) -> None:
    Spool(path).append(ROWS)
    path.write_bytes(path.read_bytes()[:-7])
    spool = Spool(path)
    assert spool.peek(100) == ROWS[:-1]
    assert spool.dropped == 1
    spool.taken()
    assert not spool


def test_a_full_spool_drops_and_counts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 300)
    spool = Spool(path)
    for row in ROWS:
        spool.append([row])
    assert spool.dropped > 0
    assert len(spool.peek(100)) == len(ROWS) - spool.dropped


def test_a_disk_that_refuses_drops_and_counts(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "no folder" / "spool.jsonl")
    spool.append(ROWS)
    assert spool.dropped == len(ROWS)
    assert not spool
