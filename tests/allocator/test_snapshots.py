"""Snapshots: when one is taken, which of them stay, and which one is believed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from allocator.recovery import recover
from allocator.replay import replay
from allocator.snapshot import freeze
from allocator.snapshots import (
    MOST_INPUTS,
    TAIL_INPUTS,
    Snapshots,
    newest_first,
    read_snapshot,
    write_snapshot,
)
from common.errors import StorageError
from common.messages import Failed, Heartbeat
from tests.allocator.mortal import Mortal, rig_of

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")


def test_the_newest_two_snapshots_stay(mortal: Mortal) -> None:
    found = []
    for _ in range(4):
        mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
        found.append(mortal.snapshot())
    assert list(newest_first(found[0].parent)) == found[:1:-1]


def test_a_snapshot_is_due_after_so_many_inputs_and_not_sooner_than_it_is_worth(
    mortal: Mortal, tmp_path: Path
) -> None:
    snapshots = Snapshots(tmp_path / "s", tail=TAIL_INPUTS - 1)
    assert not snapshots.due(10**6, 100.0)
    snapshots.count_input()
    assert snapshots.due(10**6, 100.0)
    snapshots.take(mortal.core, 10**6, 100.0)
    snapshots.close()
    assert snapshots.written == 1 and snapshots.tail == 0 and snapshots.bytes > 0
    snapshots.tail, snapshots.pause_s = TAIL_INPUTS, 1.0
    assert not snapshots.due(10**6 + snapshots.bytes // 20, 1e6), "the journal has hardly grown"
    assert snapshots.due(10**6 + snapshots.bytes, 1e6)
    snapshots._not_before = 1e6 + 1
    assert not snapshots.due(10**9, 1e6), "the last one took long"
    snapshots.tail = MOST_INPUTS
    assert snapshots.due(10**6, 1e6), "whatever it costs"


def test_a_snapshot_that_cannot_be_written_is_said_and_counted(
    mortal: Mortal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    snapshots = Snapshots(tmp_path / "file")
    snapshots.take(mortal.core, 1, 0.0)
    snapshots.close()
    assert snapshots.failed == 1 and "no snapshot was taken" in caplog.text


# --------------------------------------------------------------------------------- which one is believed


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "not one", "elsewhere"])
def test_a_damaged_snapshot_is_said_and_the_one_before_it_used(
    damage: str, mortal: Mortal, caplog: pytest.LogCaptureFixture
) -> None:
    older = mortal.snapshot()
    mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
    newest = mortal.snapshot()
    assert newest != older
    data = newest.read_bytes()
    flipped = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    newest.write_bytes(
        {"flipped": flipped, "cut": data[:-5], "empty": b"", "not one": b"x" * 99}.get(damage, data)
    )
    if damage == "elsewhere":
        newest.unlink()
        other = msgspec.structs.replace(read_snapshot(older), offset=int(newest.stem), run="another")
        write_snapshot(newest.parent, other)
    mortal.kill()
    assert mortal.recoveries[-1].snapshot == older.stem
    assert "what came before it is used" in caplog.text and str(newest.parent) in caplog.text
    assert mortal.core.audit() == [] and replay(mortal.fresh(), mortal.records()) == []


@pytest.mark.parametrize("left", [None, 0, 200])
def test_a_journal_that_is_shorter_than_when_its_snapshot_was_taken_is_refused(
    left: int | None, mortal: Mortal
) -> None:
    """What was confirmed as durable would be gone, and epochs that actors know might be given again."""
    mortal.snapshot()
    journal = mortal.rundir.allocator_journal
    if left is None:
        journal.unlink()
    else:
        journal.write_bytes(journal.read_bytes()[:left])
    with pytest.raises(StorageError, match=r"journal\.tw must hold at least .* it was cut or removed"):
        recover(mortal.fresh, mortal.rundir)


def test_with_no_sound_snapshot_the_journal_alone_suffices(mortal: Mortal) -> None:
    mortal.snapshot().write_bytes(b"")
    mortal.kill()
    assert mortal.recoveries[-1].snapshot == "" and mortal.core.audit() == []


def test_a_snapshot_that_leads_elsewhere_is_not_believed(
    mortal: Mortal, caplog: pytest.LogCaptureFixture
) -> None:
    """Sound by its checksum, and wrong: the journal behind it says so."""
    path = mortal.snapshot()
    rig = rig_of(mortal)
    for branch in mortal.branches():
        if branch.live:
            rig.say("b/1", Failed(branch.id, "drill", True))
    other = freeze(mortal.fresh())
    write_snapshot(path.parent, msgspec.structs.replace(read_snapshot(path), books=other))
    mortal.kill()
    assert "an older snapshot is used" in caplog.text and mortal.recoveries[-1].snapshot == ""
    assert mortal.core.audit() == []
