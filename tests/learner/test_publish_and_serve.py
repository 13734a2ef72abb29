"""Versions of the weights: what is kept, what is refused, and pulls over real sockets."""

import hashlib
import threading
from socket import gethostname

import pytest
import zmq

from common.codec import decode, encode
from common.config import SecurityConfig
from common.errors import ConfigError
from common.messages import (
    MAX_CHUNK_BYTES,
    Chunk,
    FromWeights,
    GetChunk,
    GetManifest,
    Hint,
    Manifest,
    Refused,
)
from common.nouns import Version
from learner.publish import VersionStore
from learner.serve import WeightsServer, reachable

BIG = bytes(range(256)) * 10_000  # 2.5 chunks
ANY = "tcp://127.0.0.1:0"


def v(step: int, lineage: int = 0) -> Version:
    return Version(lineage=lineage, step=step)


def files(step: int) -> dict[str, bytes]:
    return {"config.json": b"{%d}" % step, "model.safetensors": BIG + bytes([step])}


def test_only_the_newest_versions_are_kept_and_the_newest_is_the_default():
    store = VersionStore(keep=3)
    for step in range(5):
        store.publish(v(step), files(step))
    assert store.answer(GetManifest()).manifest.version == v(4)
    answers = [store.answer(GetManifest(v(step))) for step in range(5)]
    assert [type(answer) for answer in answers] == [Refused, Refused, Manifest, Manifest, Manifest]


def test_the_manifest_names_sizes_and_hashes():
    manifest = VersionStore(keep=1).publish(v(3), files(3))
    entry = manifest.files[1]
    assert (entry.name, entry.size) == ("model.safetensors", len(BIG) + 1)
    assert entry.sha256 == hashlib.sha256(BIG + bytes([3])).hexdigest()


def test_chunks_put_together_are_the_file_and_none_exceeds_the_limit():
    store = VersionStore(keep=1)
    store.publish(v(0), files(0))
    data = b""
    while len(data) < len(BIG) + 1:
        chunk = store.answer(GetChunk(v(0), "model.safetensors", len(data)))
        assert 0 < len(chunk.data) <= MAX_CHUNK_BYTES
        data += chunk.data
    assert data == files(0)["model.safetensors"]


@pytest.mark.parametrize(
    "request_, words",
    [
        (GetChunk(v(9), "config.json", 0), "v0.9 is not served"),
        (GetChunk(v(0), "secrets.txt", 0), "no file secrets.txt"),
        (GetChunk(v(0), "config.json", 99), "nothing at 99"),
        (GetManifest(v(0, lineage=1)), "v1.0 is not served"),
    ],
)
def test_what_is_not_there_is_refused_with_the_reason(request_, words):
    store = VersionStore(keep=1)
    store.publish(v(0), files(0))
    answer = store.answer(request_)
    assert isinstance(answer, Refused) and words in answer.reason


def test_before_the_first_publication_a_request_is_refused():
    assert isinstance(VersionStore(keep=1).answer(GetManifest()), Refused)


# ------------------------------------------------------------------------------------- over real sockets


@pytest.fixture
def server():
    store = VersionStore(keep=2)
    server = WeightsServer(store, ANY, ANY, SecurityConfig(), run="r")
    server.store = store  # type: ignore[attr-defined]
    yield server
    server.close()


class Puller:
    """A DEALER that asks and waits, as an actor does."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close(0)
        self.context.term()

    def ask(self, message):
        self.socket.send_multipart(encode(message, run="r", sender="puller/1"))
        return decode(self.socket.recv_multipart(), FromWeights).message

    def pull(self, version: Version | None = None) -> tuple[Version, dict[str, bytes]] | Refused:
        answer = self.ask(GetManifest(version))
        if isinstance(answer, Refused):
            return answer
        found = {}
        for entry in answer.manifest.files:
            data = b""
            while len(data) < entry.size:
                chunk = self.ask(GetChunk(answer.manifest.version, entry.name, len(data)))
                if isinstance(chunk, Refused):
                    return chunk
                data += chunk.data
            assert hashlib.sha256(data).hexdigest() == entry.sha256
            found[entry.name] = data
        return answer.manifest.version, found


def test_a_version_is_pulled_whole_and_a_dropped_one_is_refused(server):
    for step in range(3):
        server.announce(server.store.publish(v(step), files(step)))
    with Puller(server.weights_endpoint) as puller:
        assert puller.pull() == (v(2), files(2))
        assert puller.pull(v(1)) == (v(1), files(1))
        assert isinstance(puller.pull(v(0)), Refused)


def test_a_version_dropped_in_the_middle_of_a_pull_is_refused_and_the_newest_is_there(server):
    server.store.publish(v(0), files(0))
    with Puller(server.weights_endpoint) as puller:
        manifest = puller.ask(GetManifest()).manifest
        assert isinstance(puller.ask(GetChunk(manifest.version, "model.safetensors", 0)), Chunk)
        for step in (1, 2):
            server.store.publish(v(step), files(step))
        assert isinstance(
            puller.ask(GetChunk(manifest.version, "model.safetensors", MAX_CHUNK_BYTES)), Refused
        )
        assert puller.pull() == (v(2), files(2))


def test_many_pull_at_once_while_new_versions_are_published(server):
    server.store.publish(v(0), files(0))
    results: list[object] = []

    def pull() -> None:
        with Puller(server.weights_endpoint) as puller:
            for _ in range(4):
                results.append(puller.pull())

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(1, 6):
        server.announce(server.store.publish(v(step), files(step)))
    for thread in threads:
        thread.join(20)
    assert len(results) == 16
    whole = [result for result in results if not isinstance(result, Refused)]
    assert whole and all(found == files(version.step) for version, found in whole)


def test_a_damaged_request_is_counted_and_the_next_one_served(server):
    server.store.publish(v(0), files(0))
    with Puller(server.weights_endpoint) as puller:
        puller.socket.send_multipart([b"GET / HTTP/1.1", b"", b""])
        assert isinstance(puller.ask(GetManifest()), Manifest)
    assert server.bad_frames == 1


def test_a_hint_reaches_a_subscriber(server):
    context = zmq.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.RCVTIMEO, 200)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(server.hints_endpoint)
    found = None
    for step in range(50):  # a hint may be lost while the subscription is on its way
        server.announce(server.store.publish(v(step), files(step % 200)))
        try:
            found = decode(sub.recv_multipart(), Hint).message
            break
        except zmq.Again:
            continue
    sub.close(0)
    context.term()
    assert found is not None and found.manifest.files[0].name == "config.json"


def test_a_port_in_use_is_named_and_nothing_is_left_open(server):
    with pytest.raises(ConfigError, match="in use"):
        WeightsServer(VersionStore(keep=1), server.weights_endpoint, ANY, SecurityConfig())


def test_an_address_that_means_every_interface_is_told_as_the_name_of_this_host():
    assert reachable("tcp://0.0.0.0:5556") == f"tcp://{gethostname()}:5556"
    assert reachable("tcp://127.0.0.1:5556") == "tcp://127.0.0.1:5556"
