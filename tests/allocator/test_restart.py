"""The allocator's process, killed and started again, over real sockets: a fake actor and a fake learner go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import zmq

from allocator.core import AllocatorCore
from allocator.recovery import Recovery, recover
from allocator.replay import replay
from allocator.serve import bind
from common.codec import new_id
from common.config import SecurityConfig
from common.errors import ConfigError
from common.journal import JournalWriter, Record, read_journal
from common.messages import Bye, Durable, Heartbeat, Hello, Message, Revoke, TreeReady, Welcome
from common.rundir import RunDir
from common.sockets import SocketFactory, bound_endpoint
from tests.allocator.clients import WAIT_S, Client, FakeActor, FakeLearner, until
from tests.allocator.served import configuration, start_process

CONFIG = configuration()


class Lasting(Client):
    """Behaves as the real links do: what is not durable is said again, after a hello, to another process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kept: dict[bytes, Message] = {}

    def say(self, message: Message, msg_id: bytes | None = None) -> bytes:
        msg_id = msg_id or new_id()
        if not isinstance(message, Hello | Heartbeat | Durable):
            self.kept[msg_id] = message
        with suppress(zmq.Again):  # nobody is there just now
            super().say(message, msg_id)
        return msg_id

    def again(self) -> None:
        """Say hello and whatever may have been lost."""
        self.hello(CONFIG, version=getattr(self, "version", None))
        self.wait(Welcome)
        for msg_id, message in self.kept.items():
            if msg_id not in self.durable:
                self.say(message, msg_id)


class LastingActor(Lasting, FakeActor):
    pass


class LastingLearner(Lasting, FakeLearner):
    """Takes each tree once, however often it comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: set[int] = set()
        self.deliveries = 0

    def hear(self, seconds: float = 0.05) -> None:
        super().hear(seconds)
        for message in [m for m in self.inbox if isinstance(m, TreeReady)]:
            self.deliveries += 1
            self.inbox.remove(message)
            if message.tree.id not in self.seen:
                self.seen.add(message.tree.id)
                self.trees.append(message.tree.id)


class Restarted:
    """A run directory, its allocator's process, and clients that say hello again when another one speaks."""

    def __init__(self, folder: Path) -> None:
        self.rundir = RunDir.create(folder, "run")
        self.process: Popen[str] = start_process(self.rundir)
        self.endpoint = self.rundir.wait_endpoint("allocator", WAIT_S)
        self.actor = LastingActor(self.endpoint, "actor", "a", "")
        self.actor.hello(CONFIG)
        self.learner = LastingLearner(self.endpoint, "learner", "l", "run", config=CONFIG)
        self.learner.join()
        self.beaten = 0.0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def start(self) -> None:
        self.process = start_process(self.rundir)

    def restart(self) -> None:
        self.kill()
        self.start()

    def step(self) -> None:
        """Both clients do what there is to do, and say five times a second that they live."""
        for client in (self.actor, self.learner):
            heard = len(client.heard_from)
            client.step()
            if len(client.heard_from) > max(1, heard):
                client.again()
        if time.monotonic() - self.beaten > 0.2:
            self.beaten = time.monotonic()
            self.actor.say(Heartbeat(0, 0))
            self.learner.say(Heartbeat(0, 0))

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition, self.step, lambda: (self.learner.trees, self.actor.inbox, self.process.poll()))

    def records(self, kind: str = "") -> list[Record]:
        return [r for r in read_journal(self.rundir.allocator_journal) if kind in ("", r.kind)]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.actor.close()
        self.learner.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Restarted]:
    restarted = Restarted(tmp_path)
    yield restarted
    restarted.close()


def test_a_killed_allocator_is_found_again_where_it_was_and_the_run_comes_to_its_end(run: Restarted) -> None:
    """Port 0 was asked for, both times; nobody told the clients anything but the new process's own word."""
    run.until(lambda: len(run.learner.trained) >= 2)
    run.restart()
    run.until(lambda: run.learner.done)
    assert run.rundir.last_endpoint("allocator") == run.endpoint
    assert len(run.actor.heard_from) == len(run.learner.heard_from) == 2
    assert run.actor.wait(Bye).code == 0
    assert run.process.wait(WAIT_S) == 0
    assert len(run.learner.trained) == 6 == len(set(run.learner.trained))
    (recovered,) = run.records("recovered")
    assert recovered.fields["boot"] == 1 and recovered.fields["seconds"] < 10
    committed = [record.fields["tree"] for record in run.records("tree_committed")]
    assert sorted(committed) == sorted(run.learner.trained)
    assert replay(AllocatorCore.from_config(CONFIG, "run"), run.records()) == []


def test_what_a_peer_held_is_revoked_when_it_says_hello_again(run: Restarted) -> None:
    run.actor.play = lambda lease, turns=2: None  # type: ignore[method-assign]
    run.until(lambda: bool(run.records("lease_issued")))
    run.kill()
    issued = run.records("lease_issued")
    run.start()
    revoked: list[Any] = []
    hear = run.actor.hear

    def watched(seconds: float = 0.05) -> None:
        hear(seconds)
        revoked.extend(message for message in run.actor.inbox if isinstance(message, Revoke))

    run.actor.hear = watched  # type: ignore[method-assign]
    run.until(lambda: len(revoked) >= len(issued) and len(run.records("lease_issued")) > len(issued))
    fenced = {(r.fields["tree"], r.fields["number"], r.fields["epoch"]) for r in issued}
    assert {(x.lease.tree, x.lease.number, x.lease.epoch) for x in revoked} == fenced
    assert {r.fields["epoch"] for r in run.records("lease_issued")[len(issued) :]} == {1_000_000}


def test_a_stranger_is_not_heard_before_its_hello_though_the_books_know_it(run: Restarted) -> None:
    run.until(lambda: bool(run.records("tree_opened") and run.actor.heard_from))
    run.restart()
    run.rundir.wait_endpoint("allocator", WAIT_S)
    lost: set[bytes] = set()

    def beat() -> None:
        lost.add(run.actor.say(Heartbeat(0, 0)))
        run.actor.hear(0.2)

    until(lambda: len(run.actor.heard_from) == 2, beat)
    assert lost and not lost & run.actor.received
    recovered = run.records("recovered")[-1]
    assert not [r for r in run.records("input") if r.offset > recovered.offset and r.fields["peer"] == "a/1"]
    run.actor.inbox.clear()
    run.actor.hello(CONFIG)
    assert run.actor.wait(Welcome).run == "run"


def test_a_run_that_was_complete_when_its_allocator_died_says_goodbye(run: Restarted) -> None:
    run.until(lambda: len(run.learner.trained) >= 4)
    run.actor.confirm = False  # its goodbye stays unconfirmed, so that the first process lingers
    run.until(lambda: run.learner.done and bool([r for r in run.records("input") if _says_bye(r)]))
    run.restart()
    run.actor.inbox.clear()
    run.actor.confirm = True

    def greet() -> None:
        run.actor.hello(CONFIG)
        run.actor.hear(0.2)

    until(lambda: any(isinstance(message, Bye) for message in run.actor.inbox), greet)
    assert run.actor.wait(Bye).code == 0
    assert run.process.wait(WAIT_S) == 0
    assert run.records()[-1].kind == "end"


def _says_bye(record: Record) -> bool:
    return bool(record.fields["message"].get("type") == "Bye")


def test_trees_that_were_sent_and_not_confirmed_count_as_on_the_wire_at_the_end(run: Restarted) -> None:
    run.until(lambda: bool(run.records("tree_delivered")))
    run.restart()
    run.learner.hello(CONFIG, version=run.learner.version)
    until(lambda: bool(run.records("recovered")), lambda: run.learner.hear(0.1))
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(WAIT_S) == 0
    delivered = {r.fields["tree"] for r in run.records("tree_delivered")}
    consumed = {r.fields["tree"] for r in run.records("tree_consumed")}
    assert delivered - consumed <= set(run.records("end")[-1].fields["on_the_wire_trees"])


def test_the_clock_goes_on_where_the_journal_ends_though_the_machine_was_booted(tmp_path: Path) -> None:
    """Its monotonic clock begins anew then, and every time in the journal lies in its future."""
    rundir, later = RunDir.create(tmp_path, "run"), time.monotonic() + 1e6
    core = AllocatorCore.from_config(CONFIG, "run")
    with JournalWriter(rundir.allocator_journal) as journal:
        Recovery(core).begin(journal, later)
        core.tick(later + 1.0)
        for kind, values in core.take_records():
            journal.append(kind, **values)
    began = time.monotonic()
    process = start_process(rundir)
    try:
        assert process.wait(2 * WAIT_S) == 6, "for want of a learner, after as long as ever"
    finally:
        process.kill()
        process.communicate()
    assert time.monotonic() - began > CONFIG.cluster.connect_timeout_s
    times = [
        r.fields["now"]
        for r in read_journal(rundir.allocator_journal)
        if r.kind in ("start", "tick", "recovered")
    ]
    assert times == sorted(times) and times[-1] - times[1] < 3 * CONFIG.cluster.connect_timeout_s


# ---------------------------------------------------------------------------------------- where it listens


def bound(wanted: str, recovery: Recovery, rundir: RunDir) -> str:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return bound_endpoint(bind(SocketFactory(SecurityConfig(), context), wanted, recovery, rundir))
    finally:
        context.destroy(0)


def test_only_a_restart_takes_the_old_place_and_only_where_port_0_was_asked_for(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    first = recover(lambda: AllocatorCore.from_config(CONFIG, "run"), rundir)
    again = Recovery(None, boot=1)  # type: ignore[arg-type]
    before = bound("tcp://127.0.0.1:0", first, rundir)
    rundir.publish_endpoint("allocator", before)
    assert bound("tcp://127.0.0.1:0", again, rundir) == before
    assert bound("tcp://localhost:0", again, rundir) == before
    assert bound("tcp://127.0.0.2:0", again, rundir) != before
    assert bound(f"ipc://{tmp_path}/socket", again, rundir) != before


def test_an_old_place_that_is_taken_is_one_sentence_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allocator.serve.REBIND_S", 0.2)
    rundir = RunDir.create(tmp_path, "run")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        other = SocketFactory(SecurityConfig(), context).router("tcp://127.0.0.1:0")
        rundir.publish_endpoint("allocator", bound_endpoint(other))
        with pytest.raises(ConfigError, match="the port is in use"):
            bound("tcp://127.0.0.1:0", Recovery(None, boot=1), rundir)  # type: ignore[arg-type]
    finally:
        context.destroy(0)
