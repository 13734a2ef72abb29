"""An allocator and a weights server to talk to, over real sockets and without any sense."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq.asyncio

from common.codec import decode, encode, new_id
from common.config import SecurityConfig
from common.messages import (
    Bye,
    Chunk,
    Durable,
    FileEntry,
    GetChunk,
    GetManifest,
    Heartbeat,
    Hello,
    Manifest,
    Message,
    Received,
    Refused,
    ToAllocator,
    ToWeights,
    WeightsManifest,
    WeightsPublished,
    Welcome,
)
from common.nouns import Version
from common.sockets import SocketFactory, bound_endpoint

M = TypeVar("M", bound=Message)
SILENT = (Hello, Heartbeat, Received, Durable, Bye)
"""Messages without an acknowledgement."""


def factory() -> SocketFactory[zmq.asyncio.Socket]:
    return SocketFactory(SecurityConfig(), zmq.asyncio.Context.instance())


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    """Poll `condition`; fail the test when it stays false."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"waited {timeout_s:g} s for {what or condition}"
        await asyncio.sleep(0.005)


class FakeAllocator:
    """Answers `Hello` with `welcome` and acknowledges the rest, unless told otherwise."""

    def __init__(self, welcome: Welcome) -> None:
        self.welcome: Welcome | None = welcome
        self.messages: list[Any] = []
        """Everything that came except heartbeats and acknowledgements, repeats included."""
        self.heartbeats: list[Heartbeat] = []
        self.hellos: list[Hello] = []
        self.acked: set[bytes] = set()
        """Ids of our messages that the actor has made durable."""
        self.receive = self.durable = True
        self.deaf = False
        """Read and say nothing at all."""
        self.name = "fake/1"
        """Of this process of the allocator."""
        self.endpoint = ""
        self._peer = b""
        self._known: set[bytes] = set()
        self._socket: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, endpoint: str = "tcp://127.0.0.1:0") -> FakeAllocator:
        self._socket = factory().router(self.endpoint or endpoint)
        self.endpoint = bound_endpoint(self._socket)
        self._task = asyncio.create_task(self._serve(self._socket))
        return self

    async def close(self) -> None:
        assert self._task is not None and self._socket is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)
        await asyncio.sleep(0.05)  # the port is free when zmq's own thread has closed it

    async def __aenter__(self) -> FakeAllocator:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def send(self, message: Message, msg_id: bytes | None = None) -> bytes:
        assert self._socket is not None
        msg_id = msg_id or new_id()
        await self._socket.send_multipart(
            [self._peer, *encode(message, run="run", sender=self.name, msg_id=msg_id)]
        )
        return msg_id

    async def restart(self, name: str) -> None:
        """Another process takes its place at once; strangers are told its name, as the real one does."""
        self.name = name
        self._known.clear()
        self.messages.clear()
        await self.send(Received([]))

    async def send_raw(self, frames: list[bytes]) -> None:
        assert self._socket is not None
        await self._socket.send_multipart([self._peer, *frames])

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            envelope = decode(frames, ToAllocator)
            if self.deaf:
                continue
            message = envelope.message
            if not isinstance(message, Hello) and peer not in self._known:
                continue  # a stranger, as the allocator treats whoever has not said hello to this process
            self._peer = peer
            self._known.add(peer)
            if isinstance(message, Hello):
                self.hellos.append(message)
                if self.welcome is not None:
                    await self.send(self.welcome)
            elif isinstance(message, Durable):
                self.acked.update(message.ids)
            elif isinstance(message, Heartbeat):
                self.heartbeats.append(message)
                await self.send(Received([envelope.id]))
            else:
                self.messages.append(message)
                if not isinstance(message, SILENT):
                    if self.receive:
                        await self.send(Received([envelope.id]))
                    if self.durable:
                        await self.send(Durable([envelope.id]))


class FakeWeights:
    """Serves the files it is given; `tamper` may change an answer or (None) swallow it."""

    def __init__(self, chunk: int = 7) -> None:
        self.versions: dict[Version, dict[str, bytes]] = {}
        self.asked: list[Message] = []
        self.tamper: Callable[[Message], Message | None] = lambda message: message
        self.endpoint = self.hints = ""
        self._chunk = chunk
        self._socket: zmq.asyncio.Socket | None = None
        self._pub: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> FakeWeights:
        self._socket = factory().router(self.endpoint or "tcp://127.0.0.1:0")
        self._pub = factory().pub(self.hints or "tcp://127.0.0.1:0")
        self.endpoint, self.hints = bound_endpoint(self._socket), bound_endpoint(self._pub)
        self._task = asyncio.create_task(self._serve(self._socket))
        return self

    async def close(self) -> None:
        assert self._task is not None and self._socket is not None and self._pub is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close(0)
        self._pub.close(0)
        await asyncio.sleep(0.05)

    async def __aenter__(self) -> FakeWeights:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def add(self, version: Version, **files: bytes) -> None:
        """Files by name, with `_` for the dot before the suffix."""
        self.versions[version] = {".".join(name.rsplit("_", 1)): data for name, data in files.items()}

    def add_folder(self, version: Version, folder: Path) -> None:
        self.versions[version] = {path.name: path.read_bytes() for path in folder.iterdir()}

    def manifest(self, version: Version) -> WeightsManifest:
        files = self.versions[version]
        entries = [FileEntry(n, len(data), hashlib.sha256(data).hexdigest()) for n, data in files.items()]
        return WeightsManifest(version, entries)

    async def hint(self, version: Version) -> None:
        assert self._pub is not None
        await self._pub.send_multipart(
            encode(WeightsPublished(self.manifest(version)), run="r", sender="learner/1")
        )

    def _answer(self, request: Any) -> Message:
        if not self.versions:
            return Refused("nothing is published yet")
        match request:
            case GetManifest(version=version):
                return Manifest(self.manifest(version or max(self.versions)))
            case GetChunk(version=version, file=file, offset=offset):
                data = self.versions[version][file]
                return Chunk(version, file, offset, data[offset : offset + self._chunk])
        raise AssertionError(request)

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            request = decode(frames, ToWeights).message
            self.asked.append(request)
            answer = self.tamper(self._answer(request))
            if answer is not None:
                await socket.send_multipart([peer, *encode(answer, run="r", sender="learner/1")])
