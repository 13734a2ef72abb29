"""The measurement of a restart: it dies at the worst moment, and what comes back is the whole journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import allocator_recovery
from common.rundir import RunDir


def test_it_dies_as_far_behind_its_newest_snapshot_as_may_ever_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator_recovery, "MOST_INPUTS", 320)
    monkeypatch.setattr(allocator_recovery, "in_a_new_process", lambda path, actors: 0.5)
    found = allocator_recovery.run(960, 10, tmp_path)
    assert found["inputs"] >= 960 and found["replayed"] == found["inputs"] - 640
    assert found["snapshots"] == 1 and found["snapshot_mb"] > 0
    assert found["seconds"] > 0 and found["whole_journal_s"] > 0


def test_a_new_process_finds_the_books(tmp_path: Path) -> None:
    assert allocator_recovery.in_a_new_process(RunDir.create(tmp_path, "run").path, 10) > 0
