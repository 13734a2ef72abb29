"""Who comes in, who is replaced, who falls silent, and how a run ends: the core by hand."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import (
    Bye,
    Committed,
    Consumed,
    Credit,
    Declined,
    Failed,
    Finished,
    Heartbeat,
    Hello,
    Inspect,
    Message,
    Revoke,
    Starting,
    Welcome,
)
from common.nouns import LeaseId, Version
from tests.allocator.harness import LEARNER, Rig, granted, hello, ready, small, win

# --------------------------------------------------------------------------------------------------- hello


def test_a_hello_is_welcomed_with_the_bounds_of_the_run() -> None:
    rig, actor = ready(small(run="r1", seed=7, config_hash="c"))
    (welcome,) = rig.take(actor, Welcome)
    assert (welcome.run, welcome.seed, welcome.config_hash, welcome.version) == ("r1", 7, "c", Version(0, 0))
    assert welcome.weights_endpoint == "tcp://weights"


def test_an_actor_that_comes_before_the_learner_is_welcomed_and_waits_for_weights() -> None:
    rig = Rig()
    actor = rig.actor()
    assert rig.take(actor, Welcome)[0].version is None
    assert not rig.take(actor, Inspect) and rig.core.waiting() == "learner"
    rig.learner()
    assert rig.take(actor, Inspect)


@pytest.mark.parametrize(
    "changes, code, words",
    [
        ({"agreed": {"env.size": "5"}}, 2, ("env.size", "has 4", "has 5")),
        ({"agreed": {}}, 2, ("env.size", "has 4", "no value")),
        ({"agreed": {"env.size": "4", "env.new": "1"}}, 2, ("env.new", "no value", "has 1")),
        ({"protocol": 99}, 5, ("protocol 1", "99")),
        ({"role": "judge"}, 5, ("role", "'judge'")),
        ({"peer": "other"}, 5, ("a/1", "other/1")),
    ],
)
def test_a_hello_that_does_not_fit_gets_a_goodbye_that_names_what_was_expected(
    changes: dict, code: int, words: tuple[str, ...]
) -> None:
    rig = Rig(small(agreed={"env.size": "4"}))
    message = msgspec.structs.replace(hello("actor", "a/1", slots=1, agreed={"env.size": "4"}), **changes)
    rig.say("a/1", message)
    (bye,) = rig.take("a/1", Bye)
    assert bye.code == code
    assert all(word in bye.reason for word in words), bye.reason
    assert not rig.core.knows("a/1")


def test_an_actor_with_another_tokenizer_than_the_learner_serves_is_refused() -> None:
    rig = Rig()
    rig.say(LEARNER, hello("learner", LEARNER, version=Version(0, 0), tokenizer_hash="aaa"))
    rig.say("a/1", hello("actor", "a/1", slots=1, tokenizer_hash="bbb"))
    (bye,) = rig.take("a/1", Bye)
    assert bye.code == 2 and "aaa" in bye.reason and "bbb" in bye.reason


def test_a_stranger_is_neither_acknowledged_nor_listened_to() -> None:
    rig, _ = ready()
    handled = rig.say("b/1", Starting(LeaseId(0, 0, 0), Version(0, 0)))
    assert not handled.ack and not handled.sends and rig.stat("events/strangers") == 1


@pytest.mark.parametrize("message", [Credit(5), Consumed([0], Version(0, 1)), Committed(Version(0, 1), [0])])
def test_an_actor_may_not_speak_for_the_learner(message: Message) -> None:
    rig, actor = ready()
    credit = rig.stat("work/credit_left")
    assert rig.say(actor, message).ack
    assert rig.stat("events/forbidden") == 1 and rig.stat("work/credit_left") == credit


def test_the_learner_may_not_speak_for_an_actor() -> None:
    rig, _actor, leases = granted()
    rig.say(LEARNER, Starting(leases[0].id, Version(0, 0)))
    assert rig.stat("events/forbidden") == 1 and rig.stat("leases/running") == 0


def test_a_repeated_hello_of_the_same_process_changes_nothing_but_is_welcomed_again() -> None:
    rig, actor, _leases = granted()
    before = rig.core.stats()
    rig.actor(actor)
    assert len(rig.take(actor, Welcome)) == 2
    assert rig.core.stats() == before


def test_a_newer_incarnation_replaces_the_older_and_its_leases_go_on_under_the_next_epoch() -> None:
    rig, _, leases = granted()
    rig.start("a/1", leases[0])
    rig.expand("a/1", leases[0], 0)
    new = rig.actor("a/2")
    (bye,) = rig.take("a/1", Bye)
    assert bye.code == 6 and bye.reason.startswith("superseded: a newer process says hello as actor a")
    again = rig.leases(new)
    assert {(x.id.tree, x.id.number) for x in again} == {(x.id.tree, x.id.number) for x in leases}
    assert all(lease.id.epoch == 1 for lease in again)
    assert again[0].offset == 1 and again[0].seed == leases[0].seed
    assert rig.stat("leases/fenced") == 4


def test_a_replaced_incarnation_cannot_come_back() -> None:
    rig, _, _leases = granted()
    rig.actor("a/2")
    assert not rig.say("a/1", Heartbeat(1, 1)).ack
    rig.take("a/1", Bye)
    rig.actor("a/1")
    assert rig.take("a/1", Bye)[0].reason.startswith("superseded") and rig.core.knows("a/2")


def test_an_actor_that_lacks_what_the_rule_needs_is_refused() -> None:
    rig = Rig()
    rig.core.state.rule.requires = frozenset({"features"})  # type: ignore[misc]
    rig.say("a/1", hello("actor", "a/1", slots=1))
    assert "features" in rig.take("a/1", Bye)[0].reason
    assert isinstance(hello("actor", "a/1"), Hello)


# ------------------------------------------------------------------------------------------------- silence


def test_a_silent_actor_loses_its_leases_and_what_it_says_later_is_fenced() -> None:
    rig, actor, leases = granted()
    rig.start(actor, leases[0])
    other = rig.actor("b/1")
    rig.live(11, actor)
    again = rig.leases(other)
    assert len(again) == 4 and rig.stat("peers/actors") == 1
    assert rig.expand(actor, leases[0], 0).ack  # it wakes up
    assert rig.stat("events/revived_peers") == 1 and rig.stat("events/crossed") == 1
    assert {r.lease for r in rig.take(actor, Revoke)} == {lease.id for lease in leases}
    assert rig.core.state.forest.trees[0].branches[0].nodes == []


# ------------------------------------------------------------------------------------------------- the end


def test_when_the_learner_is_done_live_leases_are_revoked_and_the_actors_dismissed() -> None:
    rig, actor, leases = granted(small(max_policy_lag=1), slots=4)
    rig.start(actor, leases[0])
    rig.say(LEARNER, Bye(0, "done"))
    assert rig.core.ending is not None and rig.core.ending.code == 0
    assert {r.lease for r in rig.take(actor, Revoke)} == {lease.id for lease in leases}
    assert [bye.code for bye in rig.take(actor, Bye)] == [0]
    rig.say(actor, Failed(leases[0].id, "run ended", False))
    rig.say(actor, Finished(leases[1].id, 1, win()))
    for lease in leases[2:]:
        rig.say(actor, Declined(lease.id, "run ended"))
    assert rig.core.live_leases == 0 and rig.stat("leases/run_ended") == len(leases)
    rig.actor("late/1")
    assert rig.take("late/1", Bye)[0].code == 0


def test_a_learner_that_does_not_come_back_ends_the_run_with_its_own_code() -> None:
    rig, actor = ready()
    rig.live(75, LEARNER)
    assert rig.core.ending is not None and rig.core.ending.code == 6
    assert "cluster.connect_timeout_s" in rig.core.ending.reason
    assert rig.take(actor, Bye)[0].code == 6


def test_a_learner_that_never_comes_ends_the_run_too() -> None:
    rig = Rig()
    rig.actor()
    rig.tick(59)
    assert rig.core.ending is None
    rig.tick(2)
    assert rig.core.ending is not None and "no learner has said hello" in rig.core.ending.reason


def test_a_learner_that_stops_with_an_error_is_waited_for() -> None:
    rig, _ = ready()
    rig.say(LEARNER, Bye(75, "interrupted"))
    assert rig.core.ending is None
    rig.learner(incarnation="2", lineage=1)
    rig.live(61)
    assert rig.core.ending is None
