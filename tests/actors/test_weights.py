import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from actors.weights import WeightsPuller
from common.errors import EngineError, StorageError
from common.messages import Chunk, FileEntry, GetChunk, Manifest, Message, Refused, WeightsManifest
from common.nouns import Version
from tests.actors.ring import in_a_loop
from tests.actors.servers import FakeWeights, factory, until

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(0, 3)


class Installed:
    """What was handed to the engine, as it lay on disk at that time."""

    def __init__(self) -> None:
        self.contents: list[tuple[Version, dict[str, bytes]]] = []

    async def __call__(self, version: Version, folder: Path) -> None:
        assert folder.name == str(version)
        self.contents.append((version, {path.name: path.read_bytes() for path in folder.iterdir()}))

    @property
    def versions(self) -> list[Version]:
        return [version for version, _ in self.contents]


class Pulling:
    """A puller at work in `tmp_path`."""

    def __init__(self, tmp_path: Path, reply_s: float = 0.2) -> None:
        self.installed = Installed()
        self.puller = WeightsPuller(factory(), tmp_path / "weights", "a/1", self.installed, reply_s=reply_s)

    async def __aenter__(self) -> "Pulling":
        self.tasks = [asyncio.create_task(self.puller.run()), asyncio.create_task(self.puller.run_hints())]
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def until_held(self, version: Version) -> None:
        await until(lambda: self.puller.held == version, what=str(version))


def files(mark: bytes) -> dict[str, bytes]:
    return {"config_json": b"{}", "model_safetensors": mark * 30, "tokenizer_json": b""}


@in_a_loop
async def test_a_version_arrives_whole_in_many_chunks_and_an_empty_file_too(tmp_path: Path) -> None:
    async with FakeWeights(chunk=7) as server, Pulling(tmp_path) as pulling:
        server.add(V1, **files(b"abc"))
        pulling.puller.want(V1, server.endpoint)
        await pulling.until_held(V1)
        ((version, found),) = pulling.installed.contents
        assert version == V1
        assert found == {"config.json": b"{}", "model.safetensors": b"abc" * 30, "tokenizer.json": b""}


@in_a_loop
async def test_a_hint_a_repeat_and_old_news_pull_each_version_once_and_never_go_back(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        server.add(V2, **files(b"b"))
        pulling.puller.want(V2, server.endpoint)
        pulling.puller.follow(server.hints)
        await pulling.until_held(V2)
        server.add(V3, **files(b"c"))
        while pulling.puller.held != V3:  # hints to a subscriber that has just joined may be lost
            await server.hint(V3)
            await asyncio.sleep(0.02)
        pulling.puller.want(V1, server.endpoint)
        pulling.puller.want(V3, server.endpoint)
        await asyncio.sleep(0.05)
        assert pulling.installed.versions == [V2, V3]


@in_a_loop
async def test_a_new_lineage_is_newer_whatever_its_step(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        server.add(V3, **files(b"a"))
        pulling.puller.want(V3, server.endpoint)
        await pulling.until_held(V3)
        server.add(Version(1, 0), **files(b"b"))
        pulling.puller.want(Version(1, 0))
        await pulling.until_held(Version(1, 0))


def once(
    change: Callable[[Message], Message | None], kind: type[Message] = Chunk
) -> Callable[[Message], Message | None]:
    """Change the third answer of this kind, and no other."""
    seen = 0

    def tamper(message: Message) -> Message | None:
        nonlocal seen
        if not isinstance(message, kind):
            return message
        seen += 1
        return change(message) if seen == 3 else message

    return tamper


def flip(message: Message) -> Message:
    assert isinstance(message, Chunk)
    return msgspec.structs.replace(message, data=bytes([message.data[0] ^ 1]) + message.data[1:])


def shorten(message: Message) -> Message:
    assert isinstance(message, Chunk)
    return msgspec.structs.replace(message, data=b"")


def elsewhere(message: Message) -> Message:
    assert isinstance(message, Chunk)
    return msgspec.structs.replace(message, offset=message.offset + 1)


@pytest.mark.parametrize(
    "change",
    [flip, shorten, elsewhere, lambda message: None, lambda message: Refused("the version is gone")],
    ids=["wrong bytes", "nothing", "another place", "silence", "refusal"],
)
@in_a_loop
async def test_one_bad_answer_costs_one_attempt_and_nothing_wrong_is_installed(
    tmp_path: Path, change: Callable[[Message], Message | None]
) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        server.add(V1, **files(b"abc"))
        server.tamper = once(change)
        pulling.puller.want(V1, server.endpoint)
        await pulling.until_held(V1)
        assert pulling.puller.failed == 1
        assert [found["model.safetensors"] for _, found in pulling.installed.contents] == [b"abc" * 30]


@in_a_loop
async def test_bytes_that_never_match_are_never_installed(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        server.add(V1, **files(b"abc"))
        server.tamper = lambda message: flip(message) if isinstance(message, Chunk) else message
        pulling.puller.want(V1, server.endpoint)
        await until(lambda: pulling.puller.failed >= 3)
        assert pulling.installed.contents == []
        assert not (tmp_path / "weights" / str(V1)).exists()


@in_a_loop
async def test_a_server_that_is_not_there_yet_or_goes_away_in_between_is_waited_for(tmp_path: Path) -> None:
    server = FakeWeights()
    async with server:
        endpoint = server.endpoint
    async with Pulling(tmp_path) as pulling:
        pulling.puller.want(V1, endpoint)
        await until(lambda: pulling.puller.failed >= 1)
        server.add(V1, **files(b"abc"))
        async with server:
            await until(lambda: any(isinstance(request, GetChunk) for request in server.asked))
        server.asked.clear()
        async with server:
            await pulling.until_held(V1)


@in_a_loop
async def test_a_new_endpoint_is_tried_at_once_without_waiting_for_the_back_off(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path, reply_s=0.05) as pulling:
        server.add(V1, **files(b"abc"))
        pulling.puller.want(V1, "tcp://127.0.0.1:1")
        await until(lambda: pulling.puller.failed >= 4)  # the back-off has grown to seconds
        pulling.puller.want(V1, server.endpoint)
        await asyncio.wait_for(pulling.until_held(V1), 1.0)


@in_a_loop
async def test_a_manifest_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        server.add(V1, **files(b"abc"))
        entry = FileEntry("..", 3, "0" * 64)
        server.tamper = lambda m: Manifest(WeightsManifest(V1, [entry])) if isinstance(m, Manifest) else m
        pulling.puller.want(V1, server.endpoint)
        await until(lambda: pulling.puller.failed >= 1)
        assert not any(isinstance(request, GetChunk) for request in server.asked)


@in_a_loop
async def test_the_last_two_versions_stay_on_disk_and_remains_of_an_earlier_process_go(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights" / "v0.9").mkdir(parents=True)
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        for step in range(1, 5):
            server.add(Version(0, step), **files(b"x"))
            pulling.puller.want(Version(0, step), server.endpoint)
            await pulling.until_held(Version(0, step))
        await asyncio.sleep(0.05)
        assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["v0.3", "v0.4"]


@in_a_loop
async def test_weights_that_the_engine_refuses_end_the_puller_with_its_sentence(tmp_path: Path) -> None:
    async def refuse(version: Version, folder: Path) -> None:
        raise EngineError("lm_head.weight has shape [8, 4]; expected [16, 4]")

    async with FakeWeights() as server:
        server.add(V1, **files(b"abc"))
        puller = WeightsPuller(factory(), tmp_path / "weights", "a/1", refuse)
        puller.want(V1, server.endpoint)
        with pytest.raises(EngineError, match=r"lm_head\.weight"):
            await asyncio.wait_for(puller.run(), 5)


@in_a_loop
async def test_a_disk_that_refuses_ends_the_puller(tmp_path: Path) -> None:
    async with FakeWeights() as server:
        server.add(V1, **files(b"abc"))
        puller = WeightsPuller(factory(), tmp_path / "weights", "a/1", Installed())
        (tmp_path / "weights").write_text("a file where the folder should be")
        puller.want(V1, server.endpoint)
        with pytest.raises(StorageError, match=r"cannot write the weights v0\.1"):
            await asyncio.wait_for(puller.run(), 5)


@in_a_loop
async def test_a_damaged_hint_is_counted_and_ignored(tmp_path: Path) -> None:
    async with FakeWeights() as server, Pulling(tmp_path) as pulling:
        pulling.puller.follow(server.hints)
        assert server._pub is not None
        while not pulling.puller.bad_hints:  # a subscriber that has just joined may miss some
            await server._pub.send_multipart([b"noise"])
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in pulling.tasks)


@in_a_loop
async def test_a_file_that_the_version_in_use_has_too_is_linked_and_not_fetched_again(tmp_path: Path) -> None:
    """Under adapters the base is the same in every version."""
    async with FakeWeights(chunk=50) as server, Pulling(tmp_path) as pulling:
        for version, mark in ((V1, b"a"), (V2, b"b"), (V3, b"c")):
            server.add(version, model_safetensors=b"base" * 30, adapter_model_safetensors=mark * 30)
            pulling.puller.want(version, server.endpoint)
            await pulling.until_held(version)
        found = [contents["model.safetensors"] for _, contents in pulling.installed.contents]
        assert found == [b"base" * 30] * 3
        chunks = [request for request in server.asked if isinstance(request, GetChunk)]
        assert {chunk.version for chunk in chunks if chunk.file == "model.safetensors"} == {V1}
        last = pulling.installed.contents[-1][1]
        assert b"c" * 30 in last.values() and pulling.puller.reused == 2
