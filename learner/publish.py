"""Versions of the weights, held in memory and served in chunks to whoever asks.

    update ─▶ files of version v ─▶ VersionStore ◀─ GetManifest, GetChunk ─ pullers

The newest K + 1 + `keep_versions` are kept: an actor that is in the middle of one of them finishes its pull,
a later request for a dropped one is refused, and the puller asks for the newest. Safe to use from several
threads; a version's files never change once published.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from common.messages import (
    MAX_CHUNK_BYTES,
    Chunk,
    FileEntry,
    GetChunk,
    GetManifest,
    Manifest,
    Refused,
    WeightsManifest,
)
from common.nouns import Version

Answer = Manifest | Chunk | Refused


@dataclass(frozen=True, slots=True)
class Published:
    """One version: its manifest and its bytes."""

    manifest: WeightsManifest
    files: Mapping[str, bytes]


class VersionStore:
    """The last `keep` versions published."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._versions: dict[Version, Published] = {}
        self._newest: Version | None = None
        self._lock = threading.Lock()

    def publish(self, version: Version, files: Mapping[str, bytes]) -> WeightsManifest:
        """Make `version` the newest; the oldest beyond `keep` is dropped."""
        entries = [self._entry(name, data) for name, data in files.items()]
        manifest = WeightsManifest(version=version, files=entries)
        with self._lock:
            self._versions[version] = Published(manifest, dict(files))
            self._newest = version
            while len(self._versions) > self._keep:
                del self._versions[next(iter(self._versions))]
        return manifest

    def _entry(self, name: str, data: bytes) -> FileEntry:
        """A file that is the very object of the newest version (a base under adapters) is not hashed anew."""
        before = None if self._newest is None else self._versions[self._newest]
        if before is not None and before.files.get(name) is data:
            return next(entry for entry in before.manifest.files if entry.name == name)
        return FileEntry(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def answer(self, request: GetManifest | GetChunk) -> Answer:
        """What a puller asked for, or why there is none."""
        with self._lock:
            version = self._newest if request.version is None else request.version
            published = None if version is None else self._versions.get(version)
        if published is None:
            return Refused(f"version {version} is not served (any more): ask for the newest")
        if isinstance(request, GetManifest):
            return Manifest(published.manifest)
        data = published.files.get(request.file)
        if data is None:
            names = ", ".join(published.files)
            return Refused(f"version {version} has no file {request.file}; it has {names}")
        if request.offset > len(data):
            return Refused(f"{request.file} has {len(data)} bytes, there is nothing at {request.offset}")
        part = data[request.offset : request.offset + MAX_CHUNK_BYTES]
        return Chunk(version=request.version, file=request.file, offset=request.offset, data=part)
