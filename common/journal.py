"""An append-only journal: what a role did, written before anyone is told that it is safe.

    file    = magic (8 bytes)  record*
    record  = length u32 | crc32(body) u32 | crc32(length, crc32) u32 | body = msgpack [kind, fields]

The header has a checksum of its own. Otherwise one flipped bit in a length would make everything behind it
look like a torn tail. What a crash can leave is a part of what was not synced, and zeros behind it where the
file grew before its data arrived: that is cut with a warning. Anything else is damage, and refused with its
offset.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgpack
import msgspec

from common.errors import StorageError

LOG = logging.getLogger("treeward.journal")

MAGIC = b"TWJRNL\x00\x01"
HEADER = struct.Struct("<III")
START, CHECKSUM = struct.Struct("<II"), struct.Struct("<I")
"""Of the header: what its own checksum is over, and that."""
ENCODER = msgspec.msgpack.Encoder()
MAX_RECORD_BYTES = 128 << 20
"""Twice the largest message, which is the largest thing any role writes."""


@dataclass(frozen=True, slots=True)
class Record:
    """One entry, with the place in the file where it begins, and where the next one does."""

    kind: str
    fields: dict[str, Any]
    offset: int
    end: int = -1


class JournalWriter:
    """Appends records to `path`; one writer at a time, in this process or any other.

    Records are buffered until `flush`. Opening a journal that a crash left with a torn last record cuts it.

    Args:
        path: of the file; made where there is none.
        sound_to: a place between two records up to which it has been read already, and found sound.

    Raises:
        StorageError: another writer has it, it is damaged or no journal, or the disk refuses.
    """

    def __init__(self, path: Path, sound_to: int = 0) -> None:
        self._path = path
        self._buffer: list[bytes] = []
        self._failed = ""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(f"cannot open the journal {path}: {error.strerror}") from error
        try:
            self._end = self._take_over(sound_to)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def end(self) -> int:
        """Where the next record will begin, once all that was appended is flushed."""
        return self._end

    def _take_over(self, sound_to: int) -> int:
        """Lock the file, cut a torn tail, write the magic of a new one. Returns its length."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StorageError(
                f"the journal {self._path} has another writer; stop that process first"
            ) from error
        size = os.fstat(self._fd).st_size
        end = max((end for _, _, end in _scan(self._path, sound_to)), default=max(sound_to, len(MAGIC)))
        if size < len(MAGIC):
            self._guard(os.ftruncate, self._fd, 0)
            self._guard(os.write, self._fd, MAGIC)
            self._guard(os.fsync, self._fd)
            self._guard(fsync_dir, self._path.parent)
        elif end < size:
            self._guard(os.ftruncate, self._fd, end)
        return end

    def append(self, kind: str, /, **fields: Any) -> None:
        """Add a record; nouns in `fields` are stored as plain maps. It is on disk after `flush`."""
        body = ENCODER.encode((kind, fields))
        if len(body) > MAX_RECORD_BYTES:
            raise StorageError(f"a {kind} record has {len(body)} bytes, the limit is {MAX_RECORD_BYTES}")
        self._buffer += (_header(body), body)

    def flush(self, sync: bool) -> None:
        """Write what was appended; with `sync`, return only when the disk has it.

        After a failed write the file ends where it did before and the records stay buffered: a later flush
        may succeed. A failed fsync is final, since the kernel forgets which pages it could not write.

        Raises:
            StorageError: the disk is full or broken.
        """
        if self._failed:
            raise StorageError(self._failed)
        data = b"".join(self._buffer)
        if data:
            self._write(data)
            self._buffer.clear()
            self._end += len(data)
        if sync:
            try:
                os.fsync(self._fd)
            except OSError as error:
                self._failed = (
                    f"cannot sync the journal {self._path}: {error.strerror}; restart from what is written"
                )
                raise StorageError(self._failed) from error

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._end)  # shrinking needs no space: half a record must not stay
            raise StorageError(f"cannot write the journal {self._path}: {error.strerror}") from error

    def _guard(self, call: Any, *arguments: Any) -> None:
        try:
            call(*arguments)
        except OSError as error:
            raise StorageError(f"cannot write the journal {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Flush, sync and let go of the file."""
        if self._fd < 0:
            return
        try:
            self.flush(sync=True)
        finally:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_journal(path: Path, start: int = 0) -> Iterator[Record]:
    """The records of `path` in order; a torn last one is left out with a warning.

    Args:
        path: of the file.
        start: where to begin, in bytes: the beginning of a record, or of the file.

    Raises:
        StorageError: the file is missing, no journal, or damaged between `start` and its last record.
    """
    for offset, body, end in _scan(path, start):
        yield _record(body, offset, end, path)


def _scan(path: Path, start: int) -> Iterator[tuple[int, bytes, int]]:
    """(offset, body, end) of each sound record; stops with a warning at a torn tail."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"cannot read the journal {path}: {error.strerror}") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        magic = file.read(len(MAGIC))
        if not MAGIC.startswith(magic):
            raise StorageError(f"{path} is not a journal of this version: it begins with {magic!r}")
        offset = max(start, len(MAGIC))
        file.seek(offset)
        while offset < size:
            body = _read_one(file, offset, size, path)
            if body is None:
                LOG.warning("%s ends in a torn record at byte %d of %d: left out", path, offset, size)
                return
            end = offset + HEADER.size + len(body)
            yield offset, body, end
            offset = end


def _read_one(file: BinaryIO, offset: int, size: int, path: Path) -> bytes | None:
    """The body of the record at `offset`, or None where a crash tore the tail off."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    length, checksum, header_checksum = HEADER.unpack(header)
    if header_checksum != zlib.crc32(header[:8]):
        if _only_zeros(file):
            return None
        raise _damaged(path, offset, "its header")
    end = offset + HEADER.size + length
    if end > size:
        return None
    body = file.read(length)
    if zlib.crc32(body) != checksum:
        if end == size or (body.endswith(b"\0") and _only_zeros(file)):
            return None
        raise _damaged(path, offset, "its body")
    return body


def _only_zeros(file: BinaryIO) -> bool:
    return not any(any(block) for block in iter(lambda: file.read(1 << 16), b""))


def _damaged(path: Path, offset: int, what: str) -> StorageError:
    return StorageError(
        f"the journal {path} is damaged at byte {offset}: {what} does not match its checksum. "
        "Restore it from a copy, or cut it there and lose what follows"
    )


def _header(body: bytes) -> bytes:
    start = START.pack(len(body), zlib.crc32(body))
    return start + CHECKSUM.pack(zlib.crc32(start))


def _record(body: bytes, offset: int, end: int, path: Path) -> Record:
    try:
        kind, fields = msgpack.unpackb(body, strict_map_key=False)
        return Record(kind, fields, offset, end)
    except (ValueError, TypeError) as error:
        raise StorageError(
            f"the journal {path} has an unreadable record at byte {offset}: {error}"
        ) from error


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable: a created or renamed file is not, until this is done."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
