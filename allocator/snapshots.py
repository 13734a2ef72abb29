"""Snapshots of the core beside the journal, so that a restart replays only the journal's tail.

    loop ─ due? ─▶ sync the journal ─▶ freeze (the loop waits, about 1 µs a node) ─▶ a thread writes the file

    file = magic (8 bytes) | SHA-256 of the rest (32 bytes) | msgpack `Snapshot`

A file is named by the place in the journal it stands for. It is written to a neighbour, synced and renamed,
so that a crash leaves none that is half there. The newest `KEPT` stay; what is older goes once a newer one is
on disk. A write that fails costs a longer replay and nothing else: it is said, counted, and tried again.

How often: a tail is replayed at about 100 µs an input, so one is due after `TAIL_INPUTS` of them. Books that
are large are written less often, such that freezing takes at most 1/`PAUSE_SHARE` of the time and the
snapshots at most `JOURNAL_SHARE` times the bytes of the journal; but whatever it costs, after `MOST_INPUTS`.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from allocator.core import AllocatorCore
from allocator.snapshot import freeze, shape
from common.errors import StorageError
from common.logs import fields
from common.rundir import write_bytes_atomic

LOG = logging.getLogger("treeward.allocator")

MAGIC = b"TWSNAP\x00\x01"
HASH_BYTES = 32
KEPT = 2
TAIL_INPUTS = 4_000
"""Inputs behind the newest snapshot that make another one due: 0.4 s of replay."""
MOST_INPUTS = 10_000
"""A second of replay, half of what a restart may take."""
PAUSE_SHARE = 20
JOURNAL_SHARE = 10
SUFFIX = ".tw"


class Snapshot(msgspec.Struct, frozen=True):
    """The books as they were at one place in the journal."""

    run: str
    boot: int
    """Which process of the allocator wrote it, the first being 0."""
    offset: int
    """Where in the journal the first record behind it begins."""
    inputs: int
    """Messages, ticks and stops before that."""
    now: float
    """The core's clock there, in seconds."""
    shape: str
    """See `snapshot.shape`."""
    settings: dict[str, str]
    """What the decisions depended on."""
    books: bytes


def read_snapshot(path: Path) -> Snapshot:
    """The snapshot in a file.

    Raises:
        StorageError: it cannot be read, is damaged, or has the shape of another release.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot read the snapshot {path}: {error.strerror}") from error
    start = len(MAGIC) + HASH_BYTES
    body = memoryview(data)[start:]
    if not data.startswith(MAGIC):
        raise StorageError(f"{path} is not a snapshot of this version: it begins with {data[:8]!r}")
    if hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise StorageError(f"the snapshot {path} is damaged: it does not match its checksum")
    try:
        snapshot = msgspec.msgpack.decode(body, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise StorageError(f"the snapshot {path} was written by another release: {error}") from error
    if snapshot.shape != shape():
        raise StorageError(f"the snapshot {path} was written by another release, which kept other books")
    return snapshot


def write_snapshot(folder: Path, snapshot: Snapshot) -> int:
    """Put it among the others and drop those that are too old; returns its size in bytes.

    Raises:
        StorageError: the disk refuses; those that were there are as they were.
    """
    body = msgspec.msgpack.encode(snapshot)
    data = b"".join((MAGIC, hashlib.sha256(body).digest(), body))
    write_bytes_atomic(folder / f"{snapshot.offset:016d}{SUFFIX}", data)
    for path in list(newest_first(folder))[KEPT:]:
        path.unlink(missing_ok=True)
    return len(data)


def newest_first(folder: Path) -> Iterator[Path]:
    """The files of a folder, whether or not they can be read."""
    yield from sorted(folder.glob(f"[0-9]*{SUFFIX}"), reverse=True)


class Snapshots:
    """Takes a snapshot now and then.

    Args:
        folder: where they are kept; made when needed.
        boot: which process of the allocator this is.
        inputs: inputs in the journal so far; `tail` of them lie behind the newest snapshot.
    """

    def __init__(self, folder: Path, boot: int = 0, inputs: int = 0, tail: int = 0) -> None:
        self.folder, self.boot = folder, boot
        self.inputs, self.tail = inputs, tail
        self.written = self.failed = self.bytes = 0
        """Files written, and not written; bytes of the newest."""
        self.pause_s = self.longest_pause_s = 0.0
        """How long the loop waited for the last one, and at most."""
        self._not_before = 0.0
        self._offset = 0
        self._thread: threading.Thread | None = None

    def count_input(self) -> None:
        """The journal has one input more."""
        self.inputs += 1
        self.tail += 1

    def due(self, journal_end: int, now: float) -> bool:
        """Whether the time has come."""
        if self._thread is not None and self._thread.is_alive():
            return False
        worth_it = now >= self._not_before and JOURNAL_SHARE * (journal_end - self._offset) >= self.bytes
        return self.tail >= (TAIL_INPUTS if worth_it else MOST_INPUTS)

    def take(self, core: AllocatorCore, journal_end: int, now: float) -> None:
        """Freeze the core; a thread does the rest. All that led to it is in the journal and synced."""
        began = time.perf_counter()
        snapshot = Snapshot(
            run=core.state.settings.run,
            boot=self.boot,
            offset=journal_end,
            inputs=self.inputs,
            now=core.state.now,
            shape=shape(),
            settings=core.state.settings.decisive,
            books=freeze(core),
        )
        self.pause_s = time.perf_counter() - began
        self.longest_pause_s = max(self.longest_pause_s, self.pause_s)
        self._not_before = now + PAUSE_SHARE * self.pause_s
        self._offset, self.tail = journal_end, 0
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="snapshot", daemon=True)
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.bytes = write_snapshot(self.folder, snapshot)
            self.written += 1
        except (StorageError, OSError) as error:
            self.failed += 1
            what = "a restart would replay more of the journal"
            LOG.error("no snapshot was taken, %s: %s", what, error, extra=fields("snapshot_failed"))

    def close(self) -> None:
        """Wait for the one that is being written."""
        if self._thread is not None:
            self._thread.join()

    def stats(self) -> dict[str, float]:
        """Flat numbers for metrics."""
        return {
            "snapshots/written": self.written,
            "snapshots/failed": self.failed,
            "snapshots/bytes": self.bytes,
            "snapshots/pause_s": self.pause_s,
            "snapshots/longest_pause_s": self.longest_pause_s,
            "snapshots/tail_inputs": self.tail,
        }
