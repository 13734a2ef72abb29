"""The loop over real sockets, with a fake actor and a fake learner: small synchronous clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allocator.core import AllocatorCore
from allocator.loop import AllocatorLoop
from allocator.replay import replay
from common.codec import PREFIX, decode
from common.config import SecurityConfig
from common.config_allocator import BudgetConfig, RandomRuleConfig
from common.errors import PeerLost
from common.messages import (
    AllocatorToActor,
    Bye,
    Declined,
    Durable,
    Expanded,
    Failed,
    Grant,
    Heartbeat,
    Inspect,
    Inspected,
    Received,
    Revoke,
    Starting,
    TreeReady,
    Welcome,
)
from common.nouns import Version
from common.sockets import SocketFactory
from tests.allocator.clients import until
from tests.allocator.harness import ROOT, turn
from tests.allocator.served import Served, configuration, run_to_the_end


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path, configuration()) as allocator:
        yield allocator


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
    with Served(tmp_path, config) as served:
        run_to_the_end(served, served.actor("a"), served.actor("b"))
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
    with served:
        run_to_the_end(served, served.actor())
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
    until(lambda: not frames or served.loop.counts["rejected"] > 0, actor.hear)
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
    lease = first.first_leases()[0]
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
    first = actor.wait(Inspect)

    def again() -> list[Inspect]:
        return [m for m in actor.inbox if isinstance(m, Inspect) and m.tree == first.tree]

    def step() -> None:
        actor.say(Heartbeat(0, 0))
        actor.hear(0.2)

    until(lambda: bool(again()), step)
    assert again()[0] == first
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
    dead = served.actor("dead")
    dead.hello(served.config, slots=4)
    learner = served.learner()
    learner.join()
    dead.wait(Inspect)
    dead.socket.close(0)
    actor = served.actor("b")
    actor.hello(served.config)
    beat = 0.0

    def step() -> None:
        nonlocal beat
        beats = time.monotonic() - beat > 0.2
        beat = time.monotonic() if beats else beat
        for client in (learner, actor):
            client.step()
            if beats:
                client.say(Heartbeat(0, 0))

    until(lambda: learner.done, step, served.core.stats)
    assert served.core.stats()["trees/committed"] == 6 and served.core.audit() == []


def test_when_the_run_ends_held_leases_are_revoked_and_waited_for(served: Served) -> None:
    learner, actor = served.learner(), served.actor()
    learner.join()
    actor.hello(served.config, slots=2)
    leases = actor.first_leases()
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
    assert end["in_flight_leases"] == [] and leases[0].id.tree in end["in_flight_trees"]


def test_trees_that_no_learner_has_written_down_are_listed_at_the_end(served: Served) -> None:
    learner, actor = served.learner(), served.actor()
    learner.join()
    actor.hello(served.config)

    def step() -> None:
        learner.confirm = not any(isinstance(message, TreeReady) for message in learner.inbox)
        learner.hear(0.01)
        actor.step()

    until(lambda: len(learner.inbox) >= 3, step, served.core.stats)
    first, *others = [message.tree.id for message in learner.inbox if isinstance(message, TreeReady)]
    learner.say(Bye(0, "done"))
    assert served.ended() == 0
    records = served.records()
    delivered = {record.fields["tree"] for record in records if record.kind == "tree_delivered"}
    assert records[-1].fields["on_the_wire_trees"] == sorted(delivered - {first})
    assert others and first in records[-1].fields["in_flight_trees"]


def test_a_learner_that_does_not_come_ends_the_run_in_one_sentence(tmp_path: Path) -> None:
    with Served(tmp_path, configuration(connect_timeout_s=0.5)) as served:
        result = served.ended()
        assert isinstance(result, PeerLost) and "cluster.connect_timeout_s" in str(result)
        assert served.records()[-1].kind == "end"
