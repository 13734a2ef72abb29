"""The loop over real sockets, with a fake actor and a fake learner: small synchronous clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from allocator.core import AllocatorCore
from allocator.loop import AllocatorLoop
from allocator.main import run_allocator
from allocator.replay import replay
from common.codec import PREFIX, decode, encode, new_id
from common.config import ClusterConfig, Config, Role, SecurityConfig, TrackingConfig, agreed_settings
from common.config_allocator import AllocatorConfig, BudgetConfig, RandomRuleConfig
from common.config_learner import LearnerConfig
from common.errors import PeerLost, StorageError
from common.journal import JournalWriter, Record, read_journal
from common.messages import (
    PROTOCOL_VERSION,
    AllocatorToActor,
    AllocatorToLearner,
    Bye,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Declined,
    Durable,
    Expanded,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Message,
    Received,
    Revoke,
    Starting,
    TreeReady,
    Welcome,
)
from common.metrics import MetricsClient
from common.nouns import Lease, Version
from common.rundir import RunDir
from common.sockets import SocketFactory, bound_endpoint
from tests.allocator.harness import ROOT, turn, win

WAIT_S = 20.0
"""Longest wait for anything below; all of it takes milliseconds on an idle machine."""


class Client:
    """A peer: one DEALER, one incarnation, everything that came kept in `inbox`."""

    def __init__(self, endpoint: str, role: str, name: str, run: str, incarnation: str = "1") -> None:
        self.role, self.name, self.run = role, name, run
        self.incarnation = incarnation
        self.key = f"{name}/{incarnation}"
        self.context = zmq.Context()
        self.endpoint = endpoint
        self.socket = SocketFactory(SecurityConfig(), self.context).dealer(endpoint)
        self.union = AllocatorToActor if role == "actor" else AllocatorToLearner
        self.inbox: list[Any] = []
        self.received: set[bytes] = set()
        self.durable: set[bytes] = set()
        self.heard_from: list[str] = []
        """Processes of the allocator, in the order in which they were first heard."""
        self.confirm = True

    def say(self, message: Message, msg_id: bytes | None = None) -> bytes:
        msg_id = msg_id or new_id()
        self.socket.send_multipart(encode(message, run=self.run, sender=self.key, msg_id=msg_id))
        return msg_id

    def hello(self, config: Config, version: Version | None = None, slots: int = 8, **changes: Any) -> None:
        agreed = agreed_settings(config) | changes
        can = Capabilities(slots=slots, prefetch=2) if self.role == "actor" else Capabilities()
        self.say(
            Hello(self.role, self.name, self.incarnation, PROTOCOL_VERSION, can, agreed, version=version)
        )

    def hear(self, seconds: float = 0.05) -> None:
        """Take what comes for a while."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.socket.poll(int(1000 * left) + 1):
            envelope = decode(self.socket.recv_multipart(), self.union)
            if envelope.sender not in self.heard_from:
                self.heard_from.append(envelope.sender)
            match envelope.message:
                case Received(ids=ids):
                    self.received |= set(ids)
                case Durable(ids=ids):
                    self.durable |= set(ids)
                case message:
                    self.inbox.append(message)
                    if self.confirm and not isinstance(message, Welcome):
                        self.say(Durable([envelope.id]))
                    return

    def wait(self, kind: type[Any]) -> Any:
        """The next message of a kind."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            for index, message in enumerate(self.inbox):
                if isinstance(message, kind):
                    return self.inbox.pop(index)
            self.hear()
        raise AssertionError(f"{self.key} waited {WAIT_S} s for {kind.__name__}, has {self.inbox}")

    def wait_durable(self, msg_id: bytes) -> None:
        until = time.monotonic() + WAIT_S
        while msg_id not in self.durable:
            assert time.monotonic() < until, "never confirmed as durable"
            self.hear()

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


class FakeActor(Client):
    """Works off whatever it is granted, two turns a lease."""

    def step(self) -> None:
        self.hear(0.01)
        inbox, self.inbox = self.inbox, []
        for message in inbox:
            match message:
                case Inspect(tree=tree, task=task):
                    self.say(Inspected(tree, task, ROOT))
                case Grant(leases=leases):
                    for lease in leases:
                        self.play(lease)
                case Bye():
                    self.inbox.append(message)

    def play(self, lease: Lease, turns: int = 2) -> None:
        self.say(Starting(lease.id, Version(0, 0)))
        reward = float(lease.seed & 1)
        for offset in range(lease.offset, turns):
            last = offset == turns - 1
            self.say(Expanded(lease.id, offset, turn(lease, offset, last, reward=reward * last)))
        self.say(Finished(lease.id, turns, win(reward)))


class FakeLearner(Client):
    """Consumes every full batch at once, commits it, and says goodbye after the last."""

    def __init__(self, *args: Any, config: Config, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config, self.version = config, Version(0, 0)
        self.trees: list[int] = []
        self.trained: list[int] = []

    def join(self) -> None:
        self.hello(self.config, version=self.version)
        self.say(Credit(4 * self.config.learner.batch_trees))

    @property
    def done(self) -> bool:
        return self.version.step == self.config.learner.steps

    def step(self) -> None:
        self.hear(0.01)
        self.trees += [m.tree.id for m in self.inbox if isinstance(m, TreeReady)]
        self.inbox = [m for m in self.inbox if isinstance(m, Bye)]
        batch = self.config.learner.batch_trees
        if len(self.trees) >= batch and not self.done:
            trees, self.trees = self.trees[:batch], self.trees[batch:]
            self.version = Version(0, self.version.step + 1)
            self.trained += trees
            self.say(Consumed(trees, self.version))
            last = self.say(Committed(self.version, trees))
            if self.done:
                self.wait_durable(last)
                self.say(Bye(0, "done"))


class Served:
    """An allocator in a thread of this process, and its clients."""

    def __init__(self, path: Path, config: Config, loop: type[AllocatorLoop] = AllocatorLoop) -> None:
        self.config = config
        self.rundir = RunDir.create(path, "run")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        router = SocketFactory(config.security, self.context).router("tcp://127.0.0.1:0")
        self.endpoint = bound_endpoint(router)
        self.core = AllocatorCore.from_config(config, self.rundir.id)
        self.journal = JournalWriter(self.rundir.allocator_journal)
        metrics = MetricsClient("", "allocator", "allocator")
        flush_s = config.allocator.journal_flush_ms / 1000
        self.loop = loop(self.core, router, self.journal, metrics, flush_s)
        self.result: int | BaseException | None = None
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.clients: list[Client] = []

    def _serve(self) -> None:
        try:
            self.result = self.loop.run()
        except Exception as error:  # noqa: BLE001 - handed to the test
            self.result = error

    def actor(self, name: str = "a", incarnation: str = "1") -> FakeActor:
        client = FakeActor(self.endpoint, "actor", name, "", incarnation)
        self.clients.append(client)
        return client

    def learner(self) -> FakeLearner:
        client = FakeLearner(self.endpoint, "learner", "l", self.rundir.id, config=self.config)
        self.clients.append(client)
        return client

    def ended(self) -> int | BaseException | None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive(), "the allocator goes on"
        self.journal.close()
        return self.result

    def records(self) -> list[Record]:
        return list(read_journal(self.rundir.allocator_journal))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.loop.stop_signal = signal.SIGTERM
        self.thread.join(WAIT_S)
        self.journal.close()
        # Not earlier: a client whose connection breaks loses what it has not read yet (ZMQ_IMMEDIATE).
        self.context.destroy(0)


def configuration(**changes: Any) -> Config:
    """Three updates of two trees; peers are dead after a second."""
    return Config(
        role=Role.ALLOCATOR,
        learner=LearnerConfig(steps=3, batch_trees=2, max_policy_lag=1),
        allocator=AllocatorConfig(budget=BudgetConfig(continuations=3), journal_flush_ms=20.0),
        cluster=ClusterConfig(
            allocator="tcp://127.0.0.1:0", heartbeat_s=0.2, dead_after_s=1.0, connect_timeout_s=10.0
        ),
        tracking=TrackingConfig(enabled=False),
        **changes,
    )


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    allocator = Served(tmp_path, configuration())
    yield allocator
    allocator.close()


def run_to_the_end(served: Served, *actors: FakeActor) -> FakeLearner:
    learner = served.learner()
    learner.join()
    for actor in actors:
        actor.hello(served.config)
    until = time.monotonic() + WAIT_S
    while not learner.done:
        assert time.monotonic() < until, served.core.stats()
        learner.step()
        for actor in actors:
            actor.step()
    return learner


# ------------------------------------------------------------------------------------------------ tests


def test_a_whole_run_ends_with_everything_committed_and_the_actors_dismissed(served: Served) -> None:
    actors = [served.actor("a"), served.actor("b")]
    learner = run_to_the_end(served, *actors)
    assert [actor.wait(Bye).code for actor in actors] == [0, 0]
    for actor in actors:
        actor.hear(0.3)
    assert served.ended() == 0
    assert len(learner.trained) == 6 == len(set(learner.trained))
    assert served.core.audit() == [] and served.core.stats()["trees/committed"] == 6
    end = served.records()[-1]
    assert end.kind == "end" and end.fields == {
        "in_flight_trees": [], "in_flight_leases": [], "on_the_wire_trees": [],
    }  # fmt: skip


def test_the_replay_of_the_journal_decides_as_the_allocator_did(tmp_path: Path) -> None:
    config = configuration()
    config.allocator.rule = RandomRuleConfig(chains=2, expansions=1)
    config.allocator.budget = BudgetConfig(continuations=4)
    served = Served(tmp_path, config)
    try:
        run_to_the_end(served, served.actor("a"), served.actor("b"))
    finally:
        served.close()
    records = served.records()
    assert replay(AllocatorCore.from_config(config, "run"), records) == []
    other = AllocatorCore.from_config(configuration(), "run")
    assert replay(other, records), "another rule decides otherwise, and that shows"


def test_what_is_confirmed_as_durable_was_synced_before(tmp_path: Path) -> None:
    assert_durable_after_sync(tmp_path, AllocatorLoop)


def test_confirming_before_the_journal_is_synced_would_be_noticed(tmp_path: Path) -> None:
    class Hasty(AllocatorLoop):
        def _sync(self) -> None:
            self.lines.confirm_durable()
            super()._sync()

    with pytest.raises(AssertionError, match="before it was synced"):
        assert_durable_after_sync(tmp_path, Hasty)


def assert_durable_after_sync(path: Path, loop: type[AllocatorLoop]) -> None:
    """Every `Durable` leaves after a sync that came after the input it confirms, every tree after a sync of all
    that led to it, every grant after its record was written."""
    served = Served(path, configuration(), loop)
    events: list[tuple[str, Any]] = []
    append, flush, transmit = served.journal.append, served.journal.flush, served.loop.lines._transmit

    def watched_append(kind: str, /, **fields: Any) -> None:
        events.append(("append", kind))
        append(kind, **fields)

    def watched_flush(sync: bool) -> None:
        flush(sync)
        events.append(("sync" if sync else "write", None))

    def watched_transmit(route: bytes, frames: list[bytes]) -> bool:
        events.append(("send", decode(frames, AllocatorToActor | TreeReady).message))
        return transmit(route, frames)

    served.journal.append = watched_append  # type: ignore[method-assign]
    served.journal.flush = watched_flush  # type: ignore[method-assign]
    served.loop.lines._transmit = watched_transmit
    try:
        run_to_the_end(served, served.actor())
    finally:
        served.close()
    synced = written = True
    kinds = set()
    for what, detail in list(events):
        if what == "append":
            synced = synced and detail != "input"
            written = False
        elif what in ("sync", "write"):
            written = True
            synced = synced or what == "sync"
        else:
            kinds.add(type(detail))
            assert synced or not isinstance(detail, Durable), "confirmed before it was synced"
            assert synced or not isinstance(detail, TreeReady), "a tree left before it was synced"
            assert written or not isinstance(detail, Grant), "granted before it was written"
    assert {Durable, Received, Grant, Inspect, Welcome, TreeReady} <= kinds


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [PREFIX],
        [b"GET / HTTP/1.1", b"Host: x", b""],
        [PREFIX, b"\xc1", b"\xc1"],
        [PREFIX] * 40,
        [PREFIX, b"\x80", b"\xdd\xff\xff\xff\xff"],
    ],
    ids=["nothing", "empty", "one", "http", "reserved", "many", "four billion items"],
)
def test_garbage_is_counted_and_the_allocator_lives_on(served: Served, frames: list[bytes]) -> None:
    stranger = served.actor("s")
    if frames:
        stranger.socket.send_multipart(frames)
    actor = served.actor()
    actor.hello(served.config)
    actor.wait(Welcome)
    until = time.monotonic() + WAIT_S
    while frames and served.loop.counts["rejected"] == 0 and time.monotonic() < until:
        actor.hear()
    assert served.loop.counts["rejected"] == (1 if frames else 0)


def test_an_actor_with_other_settings_is_told_which_and_leaves_with_code_two(served: Served) -> None:
    actor = served.actor()
    actor.hello(served.config, **{"env.size": "9"})
    bye = actor.wait(Bye)
    assert bye.code == 2 and "env.size" in bye.reason and "has 9" in bye.reason


def test_a_peer_of_another_run_is_sent_away(served: Served) -> None:
    actor = served.actor()
    actor.run = "yesterday"
    actor.hello(served.config)
    bye = actor.wait(Bye)
    assert bye.code == 5 and "yesterday" in bye.reason


def test_an_unknown_sender_is_told_only_who_is_there_until_it_says_hello(served: Served) -> None:
    actor = served.actor()
    lost = actor.say(Heartbeat(0, 0))
    actor.hear(0.3)
    assert not actor.inbox and lost not in actor.received
    assert actor.heard_from == [served.loop.lines.sender]
    actor.hello(served.config)
    actor.wait(Welcome)


def test_a_killed_actor_is_replaced_and_its_leases_go_on_elsewhere(served: Served) -> None:
    learner = served.learner()
    learner.join()
    first = served.actor("a")
    first.hello(served.config)
    inspect = first.wait(Inspect)
    first.say(Inspected(inspect.tree, inspect.task, ROOT))
    lease = first.wait(Grant).leases[0]
    first.say(Starting(lease.id, Version(0, 0)))
    first.wait_durable(first.say(Expanded(lease.id, 0, turn(lease, 0))))
    first.socket.close(0)  # no goodbye, as after kill -9
    second = served.actor("a", incarnation="2")
    second.hello(served.config)
    again = [x for grant in [second.wait(Grant)] for x in grant.leases if x.id.number == lease.id.number]
    assert again[0].id.epoch == 1 and again[0].offset == 1 and again[0].seed == lease.seed


def test_a_message_that_was_lost_comes_again_until_it_is_confirmed(served: Served) -> None:
    actor = served.actor()
    actor.confirm = False
    actor.hello(served.config)
    served.learner().join()
    first, again = actor.wait(Inspect), None
    until = time.monotonic() + WAIT_S
    while again is None and time.monotonic() < until:
        actor.say(Heartbeat(0, 0))
        actor.hear(0.2)
        again = next((m for m in actor.inbox if isinstance(m, Inspect) and m.tree == first.tree), None)
    assert again == first
    assert served.loop.lines.counts["resent"] > 0


def test_a_reconnect_of_the_same_process_gets_what_it_missed(served: Served) -> None:
    actor = served.actor()
    actor.confirm = False
    actor.hello(served.config)
    served.learner().join()
    first = actor.wait(Inspect)
    actor.socket.close(0)
    actor.socket = SocketFactory(SecurityConfig(), actor.context).dealer(served.endpoint)
    actor.confirm = True
    actor.inbox.clear()
    actor.hello(served.config)
    assert actor.wait(Inspect) == first
    actor.say(Inspected(first.tree, first.task, ROOT))
    assert actor.wait(Grant).leases


def test_a_peer_that_is_gone_does_not_stop_the_others(served: Served) -> None:
    run_to_the_end_with_a_death(served)
    assert served.core.stats()["trees/committed"] == 6 and served.core.audit() == []


def run_to_the_end_with_a_death(served: Served) -> None:
    dead = served.actor("dead")
    dead.hello(served.config, slots=4)
    served_learner = served.learner()
    served_learner.join()
    dead.wait(Inspect)
    dead.socket.close(0)
    actor = served.actor("b")
    actor.hello(served.config)
    until = time.monotonic() + WAIT_S
    beat = 0.0
    while not served_learner.done:
        assert time.monotonic() < until, served.core.stats()
        served_learner.step()
        actor.step()
        if time.monotonic() - beat > 0.2:
            beat = time.monotonic()
            actor.say(Heartbeat(0, 0))
            served_learner.say(Heartbeat(0, 0))


def test_when_the_run_ends_held_leases_are_revoked_and_waited_for(served: Served) -> None:
    learner, actor = served.learner(), served.actor()
    learner.join()
    actor.hello(served.config, slots=2)
    inspect = actor.wait(Inspect)
    actor.say(Inspected(inspect.tree, inspect.task, ROOT))
    leases = actor.wait(Grant).leases
    actor.wait_durable(actor.say(Starting(leases[0].id, Version(0, 0))))
    learner.say(Bye(0, "done"))
    assert {actor.wait(Revoke).lease for _ in leases} == {lease.id for lease in leases}
    assert actor.wait(Bye).code == 0
    said = [actor.say(Failed(leases[0].id, "run ended", False))]
    said += [actor.say(Declined(lease.id, "run ended")) for lease in leases[1:]]
    actor.wait_durable(said[-1])
    assert served.ended() == 0
    ends = [r.fields["kind"] for r in served.records() if r.kind == "lease_ended"]
    assert ends == ["run_ended"] * len(leases)
    end = served.records()[-1].fields
    assert end["in_flight_leases"] == [] and inspect.tree in end["in_flight_trees"]


def test_trees_that_no_learner_has_written_down_are_listed_at_the_end(served: Served) -> None:
    learner, actor = served.learner(), served.actor()
    learner.join()
    actor.hello(served.config)
    until = time.monotonic() + WAIT_S
    while len(learner.inbox) < 3:
        assert time.monotonic() < until, served.core.stats()
        learner.confirm = not any(isinstance(message, TreeReady) for message in learner.inbox)
        learner.hear(0.01)
        actor.step()
    first, *others = [message.tree.id for message in learner.inbox if isinstance(message, TreeReady)]
    learner.say(Bye(0, "done"))
    assert served.ended() == 0
    records = served.records()
    delivered = {record.fields["tree"] for record in records if record.kind == "tree_delivered"}
    assert records[-1].fields["on_the_wire_trees"] == sorted(delivered - {first})
    assert others and first in records[-1].fields["in_flight_trees"]


def test_a_learner_that_does_not_come_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    config = configuration()
    config.cluster.connect_timeout_s = 0.5
    served = Served(tmp_path, config)
    try:
        result = served.ended()
        assert isinstance(result, PeerLost) and "cluster.connect_timeout_s" in str(result)
        assert served.records()[-1].kind == "end"
    finally:
        served.close()


# --------------------------------------------------------------------------------------- the process


PROCESS = """
import sys
from pathlib import Path
from allocator.main import run_allocator
from common.errors import TreewardError
from common.rundir import RunDir
from tests.allocator.test_loop import configuration
try:
    code = run_allocator(configuration(), RunDir.open(Path(sys.argv[1])))
except TreewardError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
sys.exit(code)
"""


def start_process(rundir: RunDir) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(rundir.path)], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_sigterm_tells_the_peers_and_leaves_in_order(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    process = start_process(rundir)
    try:
        endpoint = rundir.wait_endpoint("allocator", WAIT_S)
        actor = FakeActor(endpoint, "actor", "a", "")
        actor.hello(configuration())
        assert actor.wait(Welcome).run == "run"
        process.send_signal(signal.SIGTERM)
        bye = actor.wait(Bye)
        assert bye.code == 6 and "stopped" in bye.reason
        actor.hear(0.1)
        assert process.wait(WAIT_S) == 0
        actor.close()
        assert list(read_journal(rundir.allocator_journal))[-1].kind == "end"
    finally:
        process.kill()
        process.communicate()


def test_a_second_allocator_on_a_run_is_refused(tmp_path: Path) -> None:
    rundir = RunDir.create(tmp_path, "run")
    with rundir.lock("allocator"), pytest.raises(StorageError, match="is held by"):
        run_allocator(configuration(), rundir)


def test_a_run_that_is_over_is_refused_in_one_sentence(tmp_path: Path) -> None:
    config = configuration()
    config.cluster.connect_timeout_s = 1.0
    served = Served(tmp_path, config)
    try:
        run_to_the_end(served, served.actor())
        assert served.ended() == 0
    finally:
        served.close()
    with pytest.raises(StorageError, match="run has been trained already: resume="):
        run_allocator(config, served.rundir)


def test_a_run_that_ended_for_want_of_a_learner_can_be_started_again(tmp_path: Path) -> None:
    """It said: start it again, then the run."""
    config = configuration()
    config.cluster.connect_timeout_s = 0.5
    served = Served(tmp_path, config)
    try:
        assert isinstance(served.ended(), PeerLost)
    finally:
        served.close()
    with pytest.raises(PeerLost, match="no learner has said hello"):
        run_allocator(config, served.rundir)
    kinds = [record.kind for record in read_journal(served.rundir.allocator_journal)]
    assert kinds.count("start") == kinds.count("end") == 2 and kinds.count("recovered") == 1
