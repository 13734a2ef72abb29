"""The journal: what was flushed is read back, a torn tail is cut, damage is never read as data."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import StorageError
from common.journal import HEADER, MAGIC, JournalWriter, read_journal
from common.messages import Expanded
from common.nouns import BranchScore, LeaseId, Turn, TurnStatus, Version, VersionRun

ENTRIES = [("alpha", {"tree": 1}), ("beta", {"kind": "finished", "data": b"\x00\xff"}), ("gamma", {})]


@pytest.fixture(name="path")
def journal_path(tmp_path: Path) -> Path:
    return tmp_path / "journal.tw"


def write(path: Path) -> list[int]:
    """Write ENTRIES; returns where each record begins, and the end."""
    with JournalWriter(path) as journal:
        for kind, fields in ENTRIES:
            journal.append(kind, **fields)
    return [record.offset for record in read_journal(path)] + [path.stat().st_size]


def entries(path: Path) -> list[tuple[str, dict[str, object]]]:
    return [(record.kind, record.fields) for record in read_journal(path)]


def test_records_come_back_in_order_with_their_fields_even_one_called_kind(path: Path) -> None:
    offsets = write(path)
    assert entries(path) == ENTRIES
    assert offsets[0] == len(MAGIC)


def test_nouns_are_stored_as_plain_maps(path: Path) -> None:
    with JournalWriter(path) as journal:
        journal.append("consumed", version=Version(lineage=1, step=2), trees=[1, 2])
    assert entries(path) == [("consumed", {"version": {"lineage": 1, "step": 2}, "trees": [1, 2]})]


def test_a_record_is_byte_for_byte_what_msgpack_makes_of_plain_maps(path: Path) -> None:
    """Journals of releases that wrote them in two steps are read, and written on, like any other."""
    turn = Turn(
        action=b"\0" * 300,
        versions=[VersionRun(Version(0, 70_000), 1)],
        reward=-0.5,
        status=TurnStatus.TRUNCATED,
    )
    message = Expanded(LeaseId(5, 200, 1_000_000), 40_000, turn, [BranchScore(1e-9, "é", 3)])
    fields = {"message": message, "now": 2.0, "none": None, "negative": [-1, -33, -200], "kinds": {"a": 1}}
    with JournalWriter(path) as journal:
        journal.append("input", **fields)
    plain = msgpack.packb(["input", msgspec.to_builtins(fields, builtin_types=(bytes,))])
    assert path.read_bytes()[len(MAGIC) + HEADER.size :] == plain


def test_nothing_is_on_disk_before_a_flush_and_everything_after(path: Path) -> None:
    journal = JournalWriter(path)
    journal.append("alpha")
    assert entries(path) == []
    journal.flush(sync=False)
    assert entries(path) == [("alpha", {})]
    journal.close()


def test_a_reopened_journal_goes_on_behind_its_last_record(path: Path) -> None:
    write(path)
    write(path)
    assert entries(path) == ENTRIES * 2


def test_every_cut_of_the_file_leaves_the_records_before_it_and_can_be_written_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    offsets = write(path)
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(1 for end in offsets[1:] if end <= cut)
        caplog.clear()
        assert entries(path) == ENTRIES[:complete], cut
        torn = cut > len(MAGIC) and cut not in offsets
        assert bool(caplog.records) == torn, cut
        with JournalWriter(path) as journal:
            journal.append("after", cut=cut)
        assert entries(path) == [*ENTRIES[:complete], ("after", {"cut": cut})]


def test_zeros_behind_the_last_record_are_a_torn_tail(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(path)
    path.write_bytes(path.read_bytes() + bytes(5000))
    assert entries(path) == ENTRIES
    assert "torn record" in caplog.text


def test_a_part_of_what_was_written_and_zeros_behind_it_are_a_torn_tail(path: Path) -> None:
    """The file grew, and only the first part of the data arrived before the machine died."""
    offsets = write(path)
    whole = path.read_bytes()
    for cut in range(len(MAGIC), len(whole)):
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut + 100))
        complete = sum(1 for end in offsets[1:] if end <= cut)
        found = entries(path)
        # Where the bytes that did not arrive were zeros anyway, their record is whole.
        assert found in (ENTRIES[:complete], ENTRIES[: complete + 1]), cut


def test_a_journal_is_read_from_any_record_on(path: Path) -> None:
    offsets = write(path)
    for place, offset in enumerate(offsets):
        found = list(read_journal(path, offset))
        assert [(record.kind, record.fields) for record in found] == ENTRIES[place:]
        assert [record.end for record in found] == offsets[place + 1 :]


def test_what_was_read_already_is_not_read_again_to_write_on(path: Path) -> None:
    offsets = write(path)
    damaged = bytearray(path.read_bytes())
    damaged[offsets[0] + HEADER.size] ^= 1
    path.write_bytes(bytes(damaged) + b"torn")
    with JournalWriter(path, sound_to=offsets[1]) as journal:
        assert journal.end == offsets[-1], "the torn end is cut all the same"
        journal.append("after")
        journal.flush(sync=False)
        assert journal.end == path.stat().st_size
    assert [record.kind for record in read_journal(path, offsets[1])] == ["beta", "gamma", "after"]


def test_every_flipped_bit_is_refused_with_its_offset_or_cuts_only_the_last_record(path: Path) -> None:
    offsets = write(path)
    whole = path.read_bytes()
    for place in range(len(MAGIC), len(whole)):
        record = sum(1 for offset in offsets[1:] if offset <= place)
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            if record == len(ENTRIES) - 1 and place >= offsets[record] + HEADER.size:
                assert entries(path) == ENTRIES[:-1]
            else:
                with pytest.raises(StorageError, match=f"damaged at byte {offsets[record]}:"):
                    entries(path)


def test_a_damaged_journal_is_not_written_on(path: Path) -> None:
    offsets = write(path)
    damaged = bytearray(path.read_bytes())
    damaged[offsets[0]] ^= 0x40  # the length: everything behind it must not pass for a torn tail
    path.write_bytes(damaged)
    with pytest.raises(StorageError, match="damaged at byte 8"):
        JournalWriter(path)
    assert path.read_bytes() == bytes(damaged)


@pytest.mark.parametrize("content", [b"PK\x03\x04 not ours", b"TWJRNL\x00\x02 a later layout"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StorageError, match="not a journal"):
        entries(path)
    with pytest.raises(StorageError, match="not a journal"):
        JournalWriter(path)
    assert path.read_bytes() == content


def test_a_missing_journal_is_named(path: Path) -> None:
    with pytest.raises(StorageError, match=str(path)):
        entries(path)


@given(
    st.lists(
        st.tuples(
            st.text(max_size=5),
            st.dictionaries(
                st.text(min_size=1, max_size=5),
                st.one_of(
                    st.binary(max_size=40), st.integers(-(1 << 63), 1 << 62), st.none(), st.text(max_size=9)
                ),
                max_size=4,
            ),
        ),
        max_size=8,
    ),
    st.binary(max_size=30),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
def test_whatever_garbage_follows_the_records_before_it_are_read_or_it_is_refused(
    tmp_path: Path, records: list[tuple[str, dict[str, object]]], garbage: bytes
) -> None:
    path = tmp_path / "journal.tw"
    path.unlink(missing_ok=True)
    with JournalWriter(path) as journal:
        for kind, fields in records:
            journal.append(kind, **fields)
    assert entries(path) == records
    sound = path.stat().st_size
    path.write_bytes(path.read_bytes() + garbage)
    found: list[tuple[str, dict[str, object]]] | None = None
    refused = ""
    try:
        found = entries(path)
    except StorageError as error:
        refused = str(error)
    assert found == records or f"damaged at byte {sound}" in refused


def test_a_second_writer_is_refused_in_this_process_and_in_another(path: Path) -> None:
    program = (
        "import sys, pathlib; from common.journal import JournalWriter; from common.errors import StorageError\n"
        "try: JournalWriter(pathlib.Path(sys.argv[1]))\n"
        "except StorageError as error: sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with JournalWriter(path):
        with pytest.raises(StorageError, match="another writer"):
            JournalWriter(path)
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "another writer" in done.stderr
    assert subprocess.run(command, check=False).returncode == 0


def test_a_full_disk_leaves_no_half_record_and_a_later_flush_succeeds(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = JournalWriter(path)
    journal.append("alpha")
    journal.flush(sync=True)
    journal.append("beta", data=b"x" * 1000)
    real_write = os.write
    room = [10]

    def nearly_full(fd: int, data: memoryview) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(fd, data[: room.pop()])

    monkeypatch.setattr(os, "write", nearly_full)
    with pytest.raises(StorageError, match="No space left"):
        journal.flush(sync=True)
    monkeypatch.undo()
    assert entries(path) == [("alpha", {})]
    journal.close()
    assert [kind for kind, _ in entries(path)] == ["alpha", "beta"]


def test_a_file_size_limit_of_the_system_tears_nothing(path: Path) -> None:
    """The real thing: the kernel writes a part, then refuses (RLIMIT_FSIZE)."""
    program = (
        "import sys, pathlib, resource, signal\n"
        "from common.journal import JournalWriter; from common.errors import StorageError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "journal = JournalWriter(pathlib.Path(sys.argv[1]))\n"
        "journal.append('alpha'); journal.flush(sync=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "journal.append('beta', data=bytes(10000))\n"
        "try: journal.flush(sync=True)\n"
        "except StorageError as error: sys.exit(f'{error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], check=False, capture_output=True, text=True
    )
    assert "File too large" in done.stderr
    assert entries(path) == [("alpha", {})]


def test_after_a_failed_sync_the_journal_refuses_to_pretend(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = JournalWriter(path)
    journal.append("alpha")

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        journal.flush(sync=True)
    monkeypatch.undo()
    journal.append("beta")
    with pytest.raises(StorageError, match="restart"):
        journal.flush(sync=False)


def test_sync_happens_after_the_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    journal = JournalWriter(path)
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: (calls.append("write"), real_write(fd, data))[1])
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), real_sync(fd))[1])
    journal.append("alpha")
    journal.flush(sync=True)
    journal.close()
    assert calls[:2] == ["write", "sync"]


def test_warnings_about_a_torn_tail_go_to_the_project_log(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path)
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, logger="treeward.journal"):
        entries(path)
    assert str(path) in caplog.text
