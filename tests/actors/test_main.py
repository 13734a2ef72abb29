"""An actor between a fake allocator and a fake learner: it joins, works and leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from actors.main import Dismissed, run_actor
from common.config import ActorConfig, ClusterConfig, Config, Role, TrackingConfig
from common.errors import ConfigError, PeerLost, StorageError
from common.journal import read_journal
from common.messages import (
    Bye,
    Chunk,
    Declined,
    Expanded,
    Failed,
    Finished,
    Inspect,
    Inspected,
    Message,
    Revoke,
    Starting,
    Welcome,
)
from common.nouns import LeaseId, TaskId, Version
from common.tokenizer import WordTokenizer
from tests.actors.fakes import FakeEngine
from tests.actors.ring import V1, Ring, in_a_loop
from tests.actors.servers import FakeAllocator, until

ROOT = Path(__file__).resolve().parents[2]
V2 = Version(0, 2)


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ring:
    return Ring(tmp_path, monkeypatch)


@in_a_loop
async def test_an_actor_joins_pulls_weights_inspects_runs_leases_and_leaves_with_the_run(ring: Ring) -> None:
    async with ring:
        task = TaskId("frozenlake", "train", 2)
        await ring.greeted()
        await ring.allocator.send(Inspect(5, task))
        await until(lambda: bool(ring.allocator.of(Inspected)))
        await ring.grant(*range(12))
        await ring.finished(*range(12))
        assert ring.engine.loaded == [(V1, ["config.json", "model.safetensors", "tokenizer.json"])]
        hello = ring.allocator.hellos[0]
        can = hello.capabilities
        assert (hello.role, hello.peer, can.slots, can.prefetch) == ("actor", "a", 8, 8)
        assert hello.agreed["env.size"] == "4" and can.process_scores
        await ring.allocator.send(Bye(0, "all steps are done"))
        assert await ring.task == 0
        assert ring.allocator.of(Bye) == [Bye(0, "run ended")]
        kinds = ring.journal()
        assert (kinds[0], kinds[-1]) == ("start", "end")
        assert kinds.count("granted") == kinds.count("ended") == 12 and kinds.count("inspected") == 1


@in_a_loop
async def test_each_lease_arrives_in_order_and_without_gaps(ring: Ring) -> None:
    async with ring:
        await ring.greeted()
        await ring.grant(*range(16))
        await ring.finished(*range(16))
        assert_in_order(ring.allocator.messages, range(16))


def assert_in_order(messages: list[Any], numbers: range) -> None:
    """Start, turns 0, 1, 2 …, end: each once, in that order, for each lease."""
    for number in numbers:
        mine = [m for m in messages if getattr(m, "lease", None) == LeaseId(0, number, 0)]
        turns = [m.offset for m in mine if isinstance(m, Expanded)]
        assert isinstance(mine[0], Starting) and isinstance(mine[-1], Finished)
        assert turns == list(range(mine[-1].turns)) and len(mine) == len(turns) + 2


@in_a_loop
async def test_an_allocator_that_dies_and_comes_back_gets_everything_it_had_not_made_durable(
    ring: Ring,
) -> None:
    async with ring:
        first = ring.allocator
        first.durable = False
        await until(lambda: bool(first.hellos))
        await ring.grant(*range(8))
        await until(lambda: len(first.of(Expanded)) >= 4)
        await first.close()
        second = FakeAllocator(first.welcome)  # type: ignore[arg-type]
        second.endpoint = first.endpoint
        ring.allocator = await second.open()
        await ring.finished(*range(8))
        assert_in_order(second.messages, range(8))
        assert second.hellos[0].version == V1


@in_a_loop
async def test_an_actor_that_came_before_the_learner_starts_when_a_grant_names_the_weights(
    ring: Ring,
) -> None:
    async with ring:
        ring.allocator.welcome = ring.welcome(version=None)
        await ring.greeted()
        await ring.grant(0)
        await ring.finished(0)


@in_a_loop
async def test_an_actor_that_came_before_the_learner_asks_again_until_it_hears_of_weights(ring: Ring) -> None:
    async with ring:
        ring.allocator.welcome = ring.welcome(version=None)
        await ring.greeted()
        await ring.allocator.send(Inspect(5, TaskId("frozenlake", "train", 2)))
        ring.allocator.welcome = ring.welcome()
        await until(lambda: bool(ring.allocator.of(Inspected)), what="an inspection without any grant")
        hellos = len(ring.allocator.hellos)
        await asyncio.sleep(0.7)
        assert len(ring.allocator.hellos) == hellos, "once it knows, it asks no more"


@in_a_loop
async def test_a_grant_that_needs_newer_weights_starts_under_them(ring: Ring) -> None:
    async with ring:
        await until(lambda: ring.engine.version == V1)
        ring.publish(V2)
        await ring.grant(0, version=V2, min_version=V2)
        await ring.finished(0)
        assert ring.allocator.of(Starting) == [Starting(LeaseId(0, 0, 0), V2)]


@in_a_loop
async def test_wrong_bytes_never_reach_the_engine(ring: Ring, tmp_path: Path) -> None:
    wrong = 3

    def tamper(message: Message) -> Message:
        nonlocal wrong
        if isinstance(message, Chunk) and message.file == "model.safetensors" and wrong:
            wrong -= 1
            return Chunk(message.version, message.file, message.offset, b"w" * len(message.data))
        return message

    ring.weights.tamper = tamper
    async with ring:
        await until(lambda: ring.engine.version == V1)
        content = (tmp_path / "weights" / "v0.1" / "model.safetensors").read_bytes()
        assert content == b"m" * 5000 and len(ring.engine.loaded) == 1 and not wrong


@in_a_loop
async def test_heartbeats_go_on_while_the_engine_is_built(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, seen = threading.Event(), list[int]()

    def slowly(config: Config, path: Path) -> FakeEngine:
        seen.append(len(ring.allocator.heartbeats))
        assert built.wait(10)
        return ring.engine

    monkeypatch.setattr("actors.main.build_engine", slowly)
    async with ring:
        await until(lambda: bool(seen), what="the engine to be asked for")
        try:
            await until(lambda: len(ring.allocator.heartbeats) >= seen[0] + 3, what="heartbeats")
        finally:
            built.set()
        await ring.grant(0)
        await ring.finished(0)


def test_what_takes_seconds_to_import_is_there_before_anybody_is_greeted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = list[str]()

    async def actor(*args: object) -> int:
        order.append("greet")
        return 0

    monkeypatch.setattr("actors.main.engine_class", lambda config: order.append("import"))
    monkeypatch.setattr("actors.main._run", actor)
    assert run_actor(quick(tmp_path)) == 0 and order == ["import", "greet"]


@in_a_loop
async def test_a_revoke_reaches_a_running_lease(ring: Ring) -> None:
    async with ring:
        ring.engine.hold = asyncio.Event()
        await ring.greeted()
        await ring.grant(0, 1)
        await until(lambda: len(ring.engine.requests) == 2)
        await ring.allocator.send(Revoke(LeaseId(0, 1, 0), "too old"))
        await until(lambda: bool(ring.allocator.of(Failed)))
        assert [(m.lease.number, m.reason) for m in ring.allocator.of(Failed)] == [(1, "too old")]
        ring.engine.hold.set()
        await ring.finished(0)


@in_a_loop
async def test_a_goodbye_with_a_code_becomes_the_exit_code_and_its_reason_the_sentence(ring: Ring) -> None:
    async with ring:
        ring.allocator.welcome = None
        await ring.greeted()
        await ring.allocator.send(Bye(2, "env.size differs: the allocator has 5, actor a has 4"))
        with pytest.raises(Dismissed, match=r"env\.size differs") as error:
            await ring.task
        assert error.value.exit_code == 2


@in_a_loop
async def test_a_goodbye_while_leases_run_gives_them_back_first(ring: Ring) -> None:
    async with ring:
        ring.engine.hold = asyncio.Event()
        await ring.greeted()
        await ring.grant(*range(10))
        await until(lambda: len(ring.engine.requests) == 8)
        await ring.allocator.send(Bye(0, "all steps are done"))
        assert await ring.task == 0
        assert [(m.lease.number, m.reason, m.retry) for m in ring.allocator.of(Failed)] == [
            (number, "run ended", False) for number in range(8)
        ]
        assert sorted(m.lease.number for m in ring.allocator.of(Declined)) == [8, 9]
        kinds = ring.journal()
        assert kinds.count("granted") == kinds.count("ended") == 10 and kinds[-1] == "end"


@in_a_loop
async def test_a_model_that_does_not_know_the_words_of_the_environment_is_refused_in_one_sentence(
    ring: Ring,
) -> None:
    ring.publish(V1, WordTokenizer.build(("lake", "up")))
    async with ring:
        with pytest.raises(ConfigError, match=r"tokenizer does not fit env\.name=frozenlake"):
            await ring.task


@in_a_loop
async def test_a_tokenizer_of_another_run_is_refused(ring: Ring) -> None:
    ring.tokenizer_hash = "0" * 64
    async with ring:
        with pytest.raises(ConfigError, match="belong to different runs"):
            await ring.task


@in_a_loop
async def test_settings_that_differ_from_the_runs_are_refused(ring: Ring) -> None:
    async with ring:
        welcome = ring.welcome()
        ring.allocator.welcome = Welcome("run", "0" * 64, "", "", "", welcome.version, 0.05, 0.3, 0, False)
        with pytest.raises(ConfigError, match="other env or engine settings"):
            await ring.task


@in_a_loop
async def test_the_failure_of_any_task_ends_the_process(ring: Ring) -> None:
    async with ring:

        async def bug(request: Any) -> Any:
            raise AttributeError("a bug")

        ring.engine.generate = bug  # type: ignore[method-assign]
        await ring.greeted()
        await ring.grant(0)
        with pytest.raises(AttributeError, match="a bug"):
            await ring.task
        assert ring.journal()[-1] != "end", "the journal does not claim an end in order"


def quick(tmp_path: Path, **changes: Any) -> Config:
    cluster = ClusterConfig(
        allocator="tcp://127.0.0.1:1", heartbeat_s=0.05, dead_after_s=0.2, connect_timeout_s=0.4
    )
    fields: dict[str, Any] = {"actor": ActorConfig(dir=str(tmp_path / "a")), **changes}
    return Config(role=Role.ACTOR, cluster=cluster, tracking=TrackingConfig(enabled=False), **fields)


def test_without_an_allocator_the_actor_gives_up_with_code_six(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match="no allocator has answered") as error:
        run_actor(quick(tmp_path))
    assert error.value.exit_code == 6


def test_the_default_directory_is_named_after_the_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerLost):
        run_actor(quick(tmp_path, actor=ActorConfig(name="lake-7")))
    assert [path.name for path in tmp_path.iterdir()] == ["actor-lake-7"]
    assert (tmp_path / "actor-lake-7" / "journal.tw").is_file()


def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.name must be letters"):
        run_actor(quick(tmp_path, actor=ActorConfig(name="../x")))


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(StorageError, match="cannot make the actor's directory"):
        run_actor(quick(tmp_path))


@pytest.mark.parametrize("stopped", [signal.SIGTERM, signal.SIGINT])
@in_a_loop
async def test_a_process_in_an_empty_directory_joins_and_leaves_in_order_when_it_is_told_to(
    tmp_path: Path, stopped: signal.Signals
) -> None:
    allocator = FakeAllocator(Welcome("run", "", "", "", "", None, 0.5, 5.0, 0, False))
    async with allocator:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), "role=actor", f"cluster.allocator={allocator.endpoint}",
             "tracking.enabled=false"],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ},
        )  # fmt: skip
        try:
            await until(lambda: bool(allocator.hellos) or process.poll() is not None, 30)
            # It has taken the welcome in: before that there is no run to leave.
            await until(lambda: bool(allocator.heartbeats), 10)
            process.send_signal(stopped)
            await until(lambda: process.poll() is not None, 15, what="the actor to leave")
            assert process.returncode == 0, process.stderr and process.stderr.read().decode()
            assert [message.reason for message in allocator.of(Bye)] == [
                f"the actor was stopped by {stopped.name}"
            ]
        finally:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()
    (folder,) = tmp_path.iterdir()
    kinds = [record.kind for record in read_journal(folder / "journal.tw")]
    assert [kind for kind in kinds if kind != "usage"] == ["start", "end"]
