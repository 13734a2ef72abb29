"""Pulling weights: hints and grants say that there are newer ones, the bytes are fetched and checked here.

    Welcome, Grant, hint ─▶ want(version, endpoint)
                               │
            GetManifest ─▶ files with sizes and SHA-256 ─▶ GetChunk … ─▶ v0.12.part/ ─hash─▶ v0.12/ ─▶ install

consumes: `want`.  produces: `install(version, folder)`, one version after another, never an older one.
waits for: the learner's weights socket, `REPLY_S` for each answer.  unblocked by: the answer, or the timeout.
Whatever goes wrong between (silence, refusal, wrong or torn bytes) costs this attempt: a fresh socket after a
back-off. Only a folder whose files all have the manifest's hashes gets its final name, and only such a folder
is installed. Hints may be lost; every grant repeats the version. A file that the version in use has too, by
its hash, is linked and not fetched: under adapters, the base comes once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from common.codec import decode, encode
from common.errors import ProtocolError, StorageError
from common.logs import Repeats, fields
from common.messages import (
    Chunk,
    FileEntry,
    FromWeights,
    GetChunk,
    GetManifest,
    Hint,
    Manifest,
    Message,
    Refused,
)
from common.nouns import Version
from common.sockets import SocketFactory

LOG = logging.getLogger("treeward.actor.weights")

REPLY_S = 5.0
"""Silence after which an attempt is given up; the largest answer is 1 MiB."""
BACKOFF_S, MAX_BACKOFF_S = 0.25, 5.0
KEEP = 2
"""Versions that stay on disk: the one in use, and the one before it."""
HINT_POLL_MS = 500
"""How soon a changed hints endpoint is noticed."""

Install = Callable[[Version, Path], Awaitable[None]]
T = TypeVar("T", bound=Message)


class PullFailed(Exception):
    """This attempt is over; another one follows."""


class WeightsPuller:
    """See the module docstring.

    Args:
        factory: makes this process's sockets.
        folder: where versions are kept; whatever an earlier process left there is removed.
        sender: name of this process in frame headers.
        install: takes a checked folder; what it raises ends `run`.
    """

    def __init__(
        self,
        factory: SocketFactory[zmq.asyncio.Socket],
        folder: Path,
        sender: str,
        install: Install,
        *,
        reply_s: float = REPLY_S,
    ) -> None:
        self._factory, self._folder, self._sender, self._install = factory, folder, sender, install
        self._reply_s = reply_s
        self._endpoint, self._hints_endpoint = "", ""
        self._wanted: Version | None = None
        self._changed = asyncio.Event()
        self._repeats = Repeats()
        self._files: dict[tuple[str, int], Path] = {}
        """Files of the version in use, by hash and size."""
        self.held: Version | None = None
        """Newest version installed."""
        self.pulled = self.failed = self.bad_hints = self.reused = 0
        shutil.rmtree(folder, ignore_errors=True)

    def want(self, version: Version | None, endpoint: str = "") -> None:
        """There is `version`, served at `endpoint` (empty: as before). Older news changes nothing."""
        if endpoint and endpoint != self._endpoint:
            self._endpoint = endpoint
            self._changed.set()
        if version is not None and (self._wanted is None or version > self._wanted):
            self._wanted = version
            self._changed.set()

    def follow(self, hints_endpoint: str) -> None:
        """Listen for hints at this endpoint (empty: as before)."""
        self._hints_endpoint = hints_endpoint or self._hints_endpoint

    async def run(self) -> None:
        """Pull and install whatever is wanted, for ever.

        Raises:
            StorageError: the disk refuses.
            TreewardError: `install` refused weights whose bytes are right.
        """
        backoff = BACKOFF_S
        while True:
            self._changed.clear()
            if self._wanted is None or not self._endpoint or (self.held and self._wanted <= self.held):
                await self._changed.wait()
                continue
            try:
                await self._pull()
                backoff = BACKOFF_S
            except PullFailed as error:
                self.failed += 1
                self._complain(error)
                with contextlib.suppress(TimeoutError):
                    # Full jitter, so that a fleet does not come back in one wave.
                    await asyncio.wait_for(self._changed.wait(), random.uniform(0.1, 1.0) * backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_S)

    async def run_hints(self) -> None:
        """Turn hints into wants, for ever; a lost or damaged hint costs nothing."""
        while True:
            endpoint = self._hints_endpoint
            if not endpoint:
                await asyncio.sleep(HINT_POLL_MS / 1000)
                continue
            socket = self._factory.sub(endpoint)
            socket.setsockopt(zmq.RCVTIMEO, HINT_POLL_MS)
            try:
                while endpoint == self._hints_endpoint:
                    with contextlib.suppress(zmq.Again):
                        self._read_hint(await socket.recv_multipart())
            finally:
                socket.close(0)

    def _read_hint(self, frames: list[bytes]) -> None:
        try:
            self.want(decode(frames, Hint).message.manifest.version)
        except ProtocolError as error:
            self.bad_hints += 1
            LOG.debug("ignored a damaged hint: %s", error)

    async def _pull(self) -> None:
        socket = self._factory.dealer(self._endpoint)
        # Not `poll` and then `recv`: when the line breaks in between, that receive was seen to wait for ever.
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            socket.setsockopt(option, int(1000 * self._reply_s))
        try:
            manifest = (await self._ask(socket, GetManifest(), Manifest)).manifest
            if self.held is not None and manifest.version <= self.held:
                raise PullFailed(f"it serves {manifest.version}, which is not newer than {self.held}")
            folder = await self._fetch(socket, manifest.version, manifest.files)
        finally:
            socket.close(0)
        await self._install(manifest.version, folder)
        self.held = manifest.version
        self._files = {(entry.sha256, entry.size): folder / entry.name for entry in manifest.files}
        self.pulled += 1
        LOG.debug("weights %s are in use", manifest.version)
        self._clean(folder)

    async def _fetch(self, socket: zmq.asyncio.Socket, version: Version, files: list[FileEntry]) -> Path:
        """All files of `version`, checked, in a folder that gets its name when it is complete."""
        part, final = self._folder / f"{version}.part", self._folder / str(version)
        try:
            for stale in (part, final):
                shutil.rmtree(stale, ignore_errors=True)
            part.mkdir(parents=True)
            for entry in files:
                await self._fetch_file(socket, version, entry, part / entry.name)
            part.rename(final)
        except OSError as error:
            raise StorageError(f"cannot write the weights {version} to {part}: {error.strerror}") from error
        return final

    async def _fetch_file(
        self, socket: zmq.asyncio.Socket, version: Version, entry: FileEntry, path: Path
    ) -> None:
        if entry.name.startswith("."):
            raise PullFailed(f"the manifest names {entry.name!r}, which is no plain file name")
        if self._reuse(entry, path):
            return
        digest, offset = hashlib.sha256(), 0
        with path.open("wb") as file:
            while offset < entry.size:
                chunk = await self._ask(socket, GetChunk(version, entry.name, offset), Chunk)
                asked = (version, entry.name, offset)
                if (chunk.version, chunk.file, chunk.offset) != asked or not chunk.data:
                    raise PullFailed(
                        f"asked for {entry.name} at {offset}, got {chunk.file} at {chunk.offset}"
                    )
                offset += len(chunk.data)
                digest.update(chunk.data)
                file.write(chunk.data)
        if offset != entry.size or digest.hexdigest() != entry.sha256:
            raise PullFailed(f"{entry.name} of {version} does not have the size and hash of its manifest")

    def _reuse(self, entry: FileEntry, path: Path) -> bool:
        """Link the file that the version in use has with these bytes; its hash was checked when it came."""
        mine = self._files.get((entry.sha256, entry.size))
        if mine is None:
            return False
        try:
            path.hardlink_to(mine)
        except OSError:  # gone, or a file system without links: it is fetched as any other
            return False
        self.reused += 1
        return True

    async def _ask(self, socket: zmq.asyncio.Socket, request: Message, answer: type[T]) -> T:
        """One question, one answer; the socket is given up with the attempt, so no answer can come late."""
        name = type(request).__name__
        try:
            await socket.send_multipart(encode(request, run="", sender=self._sender))
            found: Any = decode(await socket.recv_multipart(), FromWeights).message
        except zmq.Again:
            raise PullFailed(f"no answer to {name} within {self._reply_s:g} s") from None
        except ProtocolError as error:
            raise PullFailed(str(error)) from error
        if isinstance(found, Refused):
            raise PullFailed(f"refused: {found.reason}")
        if not isinstance(found, answer):
            raise PullFailed(f"asked with {name}, got {type(found).__name__}")
        return found

    def _clean(self, newest: Path) -> None:
        """Keep the last `KEEP` complete versions."""
        folders = [path for path in self._folder.iterdir() if path != newest]
        complete = [path for path in folders if not path.name.endswith(".part")]
        kept = sorted(complete, key=lambda path: path.stat().st_mtime)[-(KEEP - 1) :]
        for path in folders:
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _complain(self, error: PullFailed) -> None:
        held_back = self._repeats.allow("pull_failed", asyncio.get_running_loop().time())
        if held_back is not None:
            LOG.warning(
                "weights %s were not pulled from %s: %s; trying again",
                self._wanted,
                self._endpoint,
                error,
                extra=fields("pull_failed", wanted=str(self._wanted), held_back=held_back),
            )
