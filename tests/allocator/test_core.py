"""The core by hand: one message at a time, the conservation law checked after each."""

from __future__ import annotations

import msgspec
import pytest

from common.messages import (
    Bye,
    Committed,
    Consumed,
    Credit,
    Declined,
    Dropped,
    Expanded,
    Failed,
    Finished,
    Grant,
    Heartbeat,
    Hello,
    HorizonReached,
    Inspect,
    Inspected,
    InspectFailed,
    Message,
    Revoke,
    Starting,
    TreeReady,
    Welcome,
)
from common.nouns import LeaseId, TurnStatus, Version
from common.seeds import lease_seed
from tests.allocator.harness import LEARNER, RANDOM, ROOT, Rig, hello, small, turn, win


def ready() -> tuple[Rig, str]:
    """A learner and one actor of four slots."""
    rig = Rig()
    rig.learner()
    return rig, rig.actor()


def granted() -> tuple[Rig, str, list]:
    """The same with the leases of both trees of the first wave."""
    rig, actor = ready()
    rig.inspect(actor)
    return rig, actor, rig.leases(actor)


# ------------------------------------------------------------------------------------------------ hello


def test_a_hello_is_welcomed_with_the_bounds_of_the_run() -> None:
    rig = Rig(small(run="r1", seed=7, config_hash="c"))
    rig.learner()
    rig.actor()
    (welcome,) = rig.take("a/1", Welcome)
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


# ------------------------------------------------------------------------------------- growing a tree


def test_work_is_granted_within_one_tick_of_a_hello() -> None:
    rig = Rig()
    rig.learner()
    actor = rig.actor()
    rig.inspect(actor)
    assert rig.leases(actor)


def test_a_lease_carries_all_that_is_fixed_at_grant() -> None:
    _, _, leases = granted()
    lease = leases[0]
    assert (lease.prefix, lease.snapshot, lease.history, lease.state_hash) == (
        ROOT.observation, b"root", [], "root",
    )  # fmt: skip
    assert (lease.depth, lease.offset, lease.horizon, lease.anchor) == (0, 0, 0, 0)
    assert lease.seed == lease_seed(0, lease.id.tree, lease.id.number)
    assert (lease.weight, lease.baseline, lease.predictor_version) == (0.5, 0.5, 0)
    assert lease.min_version == Version(0, 0) and lease.id.epoch == 0


def test_where_there_is_no_snapshot_the_lease_carries_the_history_that_replays_to_its_place() -> None:
    rig, actor = ready()
    for message in rig.take(actor, Inspect):
        rig.say(actor, Inspected(message.tree, message.task, msgspec.structs.replace(ROOT, snapshot=None)))
    lease = rig.leases(actor)[0]
    rig.start(actor, lease)
    turns = [msgspec.structs.replace(turn(lease, k), snapshot=None) for k in range(2)]
    for offset, sampled in enumerate(turns):
        rig.say(actor, Expanded(lease.id, offset, sampled))
    rig.say(actor, Failed(lease.id, "drill", True))
    (again,) = rig.leases(actor)
    assert [(s.action, s.seed) for s in again.history] == [(t.action_text, t.seed) for t in turns]
    assert again.prefix == ROOT.observation + b"".join(t.action + t.observation for t in turns)
    assert (again.offset, again.depth, again.id.epoch) == (2, 2, 1)


def test_a_finished_tree_is_delivered_in_canonical_order_whoever_was_first() -> None:
    trees = []
    for order in ((0, 1), (1, 0)):
        rig, actor, leases = granted()
        pair = [leases[i] for i in order]
        for lease in pair:
            rig.start(actor, lease)
        for lease in pair:
            rig.expand(actor, lease, 0)
        for lease in reversed(pair):
            rig.expand(actor, lease, 1, last=True)
            rig.say(actor, Finished(lease.id, 2, win()))
        trees.append(rig.take(LEARNER, TreeReady)[0].tree)
    assert trees[0] == trees[1]
    assert [(n.lease, n.offset, n.parent) for n in trees[0].nodes] == [
        (-1, 0, -1), (0, 0, 0), (0, 1, 1), (1, 0, 0), (1, 1, 3),
    ]  # fmt: skip
    assert [n.value for n in trees[0].nodes] == [0.5, 0.5, None, 0.5, None]
    assert [c.nodes for c in trees[0].continuations] == [[1, 2], [3, 4]]
    assert trees[0].planned_weight == 1.0


@pytest.mark.parametrize("copies", [1, 3])
def test_repeats_are_acknowledged_and_change_nothing(copies: int) -> None:
    rig, actor, leases = granted()
    for lease in leases[:2]:
        said = [Starting(lease.id, Version(0, 0)), Expanded(lease.id, 0, turn(lease, 0, True))]
        for message in [*said, Finished(lease.id, 1, win())]:
            assert all(rig.say(actor, message).ack for _ in range(copies))
        assert all(rig.say(actor, m).ack for m in said)
    (tree,) = rig.take(LEARNER, TreeReady)
    assert len(tree.tree.nodes) == 3 and rig.stat("leases/finished") == 2


def test_a_turn_or_an_end_that_comes_before_what_precedes_it_is_not_acknowledged() -> None:
    rig, actor, (lease, *_) = granted()
    assert not rig.expand(actor, lease, 0).ack  # Starting is missing
    assert not rig.say(actor, Finished(lease.id, 1, win())).ack
    rig.start(actor, lease)
    assert not rig.expand(actor, lease, 1).ack
    assert not rig.say(actor, Finished(lease.id, 1, win())).ack
    assert rig.expand(actor, lease, 0, last=True).ack
    assert rig.say(actor, Finished(lease.id, 1, win())).ack
    assert rig.stat("events/gaps") == 4


@pytest.mark.parametrize(
    "message",
    [
        Finished(LeaseId(0, 0, 0), 0, win()),
        HorizonReached(LeaseId(0, 0, 0), 1),
        Expanded(LeaseId(0, 0, 0), 1, ROOT),
        Finished(LeaseId(9, 0, 0), 1, win()),
        Finished(LeaseId(0, 0, 7), 1, win()),
    ],
    ids=["an end without turns", "no horizon", "a turn after the last", "no such tree", "a future epoch"],
)
def test_what_cannot_be_is_counted_and_has_no_effect(message: Message) -> None:
    rig, actor, (lease, *_) = granted()
    rig.start(actor, lease)
    rig.expand(actor, lease, 0, last=True)
    before = rig.core.stats()
    assert rig.say(actor, message).ack
    assert rig.core.stats() == {**before, "events/invalid": 1.0}


def test_an_actor_cannot_report_about_the_lease_of_another() -> None:
    rig, actor, leases = granted()
    other = rig.actor("b/1")
    rig.start(actor, leases[0])
    rig.expand(other, leases[0], 0)
    assert rig.stat("events/fenced") == 1
    assert rig.core.state.forest.trees[0].branches[0].nodes == []


def test_a_failure_is_never_an_outcome_and_its_retry_resumes_behind_the_accepted_turns() -> None:
    rig, actor, leases = granted()
    rig.start(actor, leases[0])
    rig.expand(actor, leases[0], 0)
    rig.say(actor, Failed(leases[0].id, "env", True, discarded_tokens=3))
    (again,) = rig.leases(actor)
    assert again.id == LeaseId(0, 0, 1) and again.offset == 1 and again.seed == leases[0].seed
    assert (again.weight, again.baseline, again.score_stamp) == (leases[0].weight, leases[0].baseline, 0)
    rig.finish(actor, again, turns=3)
    rig.finish(actor, leases[1])
    (tree,) = rig.take(LEARNER, TreeReady)
    assert [len(c.nodes) for c in tree.tree.continuations] == [3, 2]
    assert rig.stat("events/discarded_tokens") == 3


def test_after_too_many_failures_a_continuation_is_dropped_but_stays_in_the_denominator() -> None:
    rig, actor, leases = granted()
    lease = leases[0]
    for _ in range(3):
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "poison", True))
        lease = next(iter(rig.leases(actor)), lease)
    rig.finish(actor, leases[1])
    (tree,) = rig.take(LEARNER, TreeReady)
    first = tree.tree.continuations[0]
    assert first.outcome is None and first.ended == "dropped: poison" and first.weight == 0.5
    assert tree.tree.planned_weight == 1.0
    assert (rig.stat("leases/failed"), rig.stat("leases/dropped")) == (2, 1)


def test_a_tree_without_any_outcome_is_dropped_and_its_place_goes_to_another() -> None:
    rig, actor, leases = granted()
    for lease in leases[:2]:
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "broken", False))
    assert rig.stat("trees/dropped/no_outcome") == 1 and rig.stat("trees/opened") == 3
    assert [m.tree for m in rig.take(actor, Inspect)] == [2]
    assert rig.core.state.forest.trees[2].wave == 0


def test_a_declined_lease_goes_elsewhere_and_its_actor_rests_for_a_heartbeat() -> None:
    rig, actor, leases = granted()
    other = rig.actor("b/1")
    rig.say(actor, Declined(leases[0].id, "no weights"))
    (again,) = rig.leases(other)
    assert again.id == LeaseId(0, 0, 1)
    rig.say(other, Declined(again.id, "no weights"))
    assert not rig.leases(actor) and not rig.leases(other)  # no ping-pong at the speed of messages
    rig.tick(1.1)
    assert len(rig.leases(actor) + rig.leases(other)) == 1


def test_an_end_that_only_a_dead_attempt_had_delivered_all_turns_of_is_taken_from_the_next() -> None:
    rig, actor, leases = granted()
    rig.start(actor, leases[0])
    rig.expand(actor, leases[0], 0, last=True)
    new = rig.actor("a/2")
    again = next(lease for lease in rig.leases(new) if lease.id.number == 0 and lease.id.tree == 0)
    assert again.offset == 1 and again.snapshot is None and len(again.history) == 1
    assert rig.say(new, Finished(again.id, 1, win())).ack
    assert rig.stat("leases/finished") == 1


# ------------------------------------------------------------------------------------ deadlines, deaths


def test_heartbeats_renew_no_lease_but_turns_do() -> None:
    rig, actor, leases = granted()
    for lease in leases:
        rig.start(actor, lease)
    for offset in range(4):
        rig.expand(actor, leases[0], offset)
        rig.live(10)
    assert rig.stat("leases/expired") == 3
    assert {r.lease.number for r in rig.take(actor, Revoke)} <= {0, 1}
    assert rig.core.state.forest.trees[0].branches[0].live


def test_a_queued_lease_does_not_expire_while_its_actor_gets_on_with_others() -> None:
    rig = Rig()
    rig.learner()
    actor = rig.actor(slots=1, prefetch=3)
    rig.inspect(actor)
    leases = rig.leases(actor)
    assert len(leases) == 4
    rig.start(actor, leases[0])
    for offset in range(5):
        rig.live(20)
        rig.expand(actor, leases[0], offset)
    assert rig.stat("leases/expired") == 0
    rig.live(31)
    assert rig.stat("leases/expired") == 4  # a hung actor loses what it runs and what it queues


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


def test_the_slot_of_a_lease_that_was_taken_back_stays_taken_until_its_actor_says_so() -> None:
    rig, actor, leases = granted()
    for lease in leases:
        rig.start(actor, lease)
    rig.live(31)
    assert not rig.leases(actor) and rig.stat("peers/room") == 0
    rig.say(actor, Failed(leases[0].id, "revoked", False))
    assert len(rig.leases(actor)) == 1


def test_trees_being_set_up_by_an_actor_that_dies_or_fails_are_set_up_elsewhere() -> None:
    rig, actor = ready()
    first = rig.take(actor, Inspect)
    other = rig.actor("b/1")
    rig.say(actor, InspectFailed(first[0].tree, "no"))
    assert [m.tree for m in rig.take(other, Inspect)] == [first[0].tree]
    rig.say(actor, Bye(0, "leaving"))
    assert {m.tree for m in rig.take(other, Inspect)} == {m.tree for m in first[1:]}


def test_a_task_that_cannot_be_set_up_anywhere_is_dropped_with_a_reason() -> None:
    rig, actor = ready()
    for _ in range(3):
        for message in rig.take(actor, Inspect):
            if message.tree == 0:
                rig.say(actor, InspectFailed(0, "broken map"))
    assert rig.stat("trees/dropped/inspect_failed") == 1


def test_an_inspection_without_an_answer_is_repeated_and_a_late_answer_ignored() -> None:
    rig, actor = ready()
    first = rig.take(actor, Inspect)
    rig.live(31)
    again = rig.take(actor, Inspect)
    assert {m.tree for m in again} == {m.tree for m in first}
    for message in [*again, *first]:
        assert rig.say(actor, Inspected(message.tree, message.task, ROOT)).ack
    assert rig.stat("events/duplicates") == len(first)


# --------------------------------------------------------------------------------------- spreading work


def test_leases_go_to_the_actor_with_the_lowest_load() -> None:
    rig = Rig(small(batch_trees=4), continuations=4)
    rig.learner()
    small_one, large = rig.actor("a/1", slots=2), rig.actor("b/1", slots=8)
    for actor in (small_one, large, small_one, large):
        rig.inspect(actor)
    held = {actor: len(rig.leases(actor)) for actor in (small_one, large)}
    assert held == {small_one: 2, large: 8}


def test_a_late_actor_gets_work_though_all_of_it_was_granted_before_it_came() -> None:
    rig = Rig(small(batch_trees=1))
    rig.learner()
    early = rig.actor("a/1", slots=1, prefetch=8)
    rig.inspect(early)
    leases = rig.leases(early)
    rig.start(early, leases[0])
    late = rig.actor("b/1", slots=4)
    rig.tick(0.2)
    (taken,) = rig.leases(late)
    assert taken.id == LeaseId(0, 1, 1) and taken.seed == leases[1].seed
    assert [r.lease for r in rig.take(early, Revoke)] == [leases[1].id]
    assert rig.start(early, leases[1]).ack  # it crosses the revoke
    assert rig.stat("events/crossed") == 1 and rig.stat("leases/running") == 1


# ---------------------------------------------------------------------------------- score staleness, D


def test_a_rule_that_reads_nothing_is_never_throttled_and_never_speculative() -> None:
    rig, _actor, leases = granted()
    assert len(leases) == 4 and rig.stat("leases/speculative_share") == 0


def test_without_staleness_a_round_waits_until_all_chains_have_ended() -> None:
    rig = Rig(rule=RANDOM, continuations=6)
    rig.learner()
    actor = rig.actor(slots=16)
    rig.inspect(actor)
    chains = [lease for lease in rig.leases(actor) if lease.id.tree == 0]
    assert len(chains) == 2
    rig.finish(actor, chains[0])
    assert not rig.leases(actor)
    rig.finish(actor, chains[1])
    assert len(rig.leases(actor)) == 4
    assert rig.stat("leases/speculative_share") == 0


def test_with_staleness_a_round_may_be_speculative_and_a_lease_too_old_at_its_start_is_revoked() -> None:
    rig = Rig(small(batch_trees=1, max_score_staleness=3), RANDOM, continuations=6)
    rig.learner()
    actor = rig.actor(slots=16)
    rig.inspect(actor)
    chains = rig.leases(actor)
    for lease in chains:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    round_one = rig.leases(actor)
    assert len(round_one) == 4  # 2 outstanding of another decision, D = 3
    assert rig.start(actor, round_one[0]).ack
    rig.expand(actor, chains[0], 1)
    rig.start(actor, round_one[1])  # one event since, 2 outstanding: age 3, just young enough
    rig.expand(actor, chains[0], 2)
    rig.start(actor, round_one[2])  # age 4
    assert [r.lease for r in rig.take(actor, Revoke)] == [round_one[2].id]
    assert rig.stat("events/too_old") == 1 and rig.stat("leases/score_age_max") == 3
    rig.say(actor, Expanded(round_one[2].id, 0, turn(round_one[2], 0)))
    assert rig.stat("events/crossed") == 1  # discarded, whatever it was


def test_a_started_lease_is_never_revoked_for_its_age_not_even_when_it_is_tried_again() -> None:
    rig = Rig(small(batch_trees=1, max_score_staleness=3), RANDOM, continuations=6)
    rig.learner()
    actor = rig.actor(slots=16)
    rig.inspect(actor)
    chains = rig.leases(actor)
    for lease in chains:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    round_one = rig.leases(actor)
    rig.start(actor, round_one[0])
    for offset in range(1, 4):
        rig.expand(actor, chains[0], offset)
    rig.say(actor, Failed(round_one[0].id, "env", True))
    again = [lease for lease in rig.leases(actor) if lease.id.number == round_one[0].id.number]
    assert [lease.id.epoch for lease in again] == [1]
    rig.start(actor, again[0])
    assert rig.stat("events/too_old") == 0 and rig.stat("leases/running") == 3


def test_a_revoked_lease_gives_its_budget_back_and_the_rule_decides_anew() -> None:
    rig = Rig(small(batch_trees=1, steps=1, max_score_staleness=2), RANDOM, continuations=6)
    rig.learner()
    actor = rig.actor(slots=16)
    rig.inspect(actor)
    chains = rig.leases(actor)
    for lease in chains:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    old = rig.leases(actor)
    rig.expand(actor, chains[0], 1)
    for lease in old:
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "revoked", False))
    for lease in chains:
        last = len(rig.core.state.forest.trees[0].branches[lease.id.number].nodes)
        rig.expand(actor, lease, last, last=True)
        rig.say(actor, Finished(lease.id, last + 1, win()))
    assert rig.work(actor) == 4
    (tree,) = rig.take(LEARNER, TreeReady)
    assert [c.number for c in tree.tree.continuations] == [0, 1, 6, 7, 8, 9]
    assert tree.tree.planned_weight == pytest.approx(1.0)


# ----------------------------------------------------------------------------------- the learner's side


def test_no_more_trees_are_opened_than_the_learner_can_train_in_time() -> None:
    rig = Rig(small(steps=3, batch_trees=2, max_policy_lag=0))
    rig.learner()
    actor = rig.actor(slots=64)
    rig.work(actor)
    assert rig.stat("trees/opened") == 2 and rig.core.waiting() == "work_ahead"
    rig.consume([0, 1], step=1)
    assert rig.stat("trees/opened") == 4 - 0
    rig.work(actor)
    rig.consume([2, 3], step=2)
    rig.work(actor)
    rig.consume([4, 5], step=3)
    rig.work(actor)
    assert rig.stat("trees/opened") == 6  # steps x batch, not one more


def test_a_dropped_tree_leaves_the_sum_at_once() -> None:
    rig, actor = ready()
    rig.work(actor)
    rig.say(LEARNER, Dropped(0, "stale"))
    assert rig.stat("trees/dropped/stale") == 1
    assert [m.tree for m in rig.take(actor, Inspect)] == [2]


def test_trees_are_delivered_within_the_credit_and_a_repeated_credit_adds_nothing() -> None:
    rig = Rig(small(batch_trees=4))
    rig.learner(credit=1)
    actor = rig.actor(slots=64)
    rig.work(actor)
    assert [m.tree.id for m in rig.take(LEARNER, TreeReady)] == [0] and rig.core.waiting() == "credit"
    rig.say(LEARNER, Credit(1))
    assert not rig.take(LEARNER, TreeReady)
    rig.say(LEARNER, Credit(3))
    rig.say(LEARNER, Credit(3))
    assert [m.tree.id for m in rig.take(LEARNER, TreeReady)] == [1, 2]


def test_a_new_learner_incarnation_gets_again_what_its_checkpoint_does_not_hold() -> None:
    rig = Rig(small(steps=4, batch_trees=2, max_policy_lag=2))
    rig.learner()
    actor = rig.actor(slots=64)
    rig.work(actor)
    rig.consume([0, 1], step=1)
    rig.say(LEARNER, Committed(Version(0, 1), [0, 1]))
    rig.consume([2, 3], step=2)
    rig.consume([4, 5], step=3)
    rig.work(actor)
    rig.take(LEARNER, TreeReady)
    new = rig.learner(step=2, lineage=1, incarnation="2")  # its checkpoint of step 2 was saved, not announced
    assert [m.tree.id for m in rig.take(new, TreeReady)] == [4, 5, 6, 7]
    assert rig.stat("trees/committed") == 4
    assert not rig.say(LEARNER, Consumed([4], Version(0, 4))).ack  # the old one is not heard any more
    assert rig.stat("work/step") == 2


def test_trees_of_a_checkpoint_that_was_lost_are_replaced_by_others() -> None:
    rig = Rig(small(steps=2, batch_trees=2, max_policy_lag=1))
    rig.learner()
    actor = rig.actor(slots=64)
    rig.work(actor)
    rig.consume([0, 1], step=1)
    rig.say(LEARNER, Committed(Version(0, 1), [0, 1]))
    rig.learner(step=0, lineage=1, incarnation="2")
    assert rig.stat("trees/dropped/checkpoint_lost") == 2 and rig.stat("trees/committed") == 0
    assert rig.stat("trees/opened") == 6


def test_a_lease_may_not_start_with_weights_older_than_the_learner_trains() -> None:
    rig = Rig(small(steps=9, batch_trees=1, max_policy_lag=2))
    rig.learner(step=5)
    actor = rig.actor()
    rig.inspect(actor)
    assert {lease.min_version for lease in rig.leases(actor)} == {Version(0, 3)}


def test_consumed_of_another_lineage_moves_nothing() -> None:
    rig, actor = ready()
    rig.work(actor)
    rig.say(LEARNER, Consumed([0, 1], Version(3, 9)))
    assert rig.stat("work/step") == 0 and rig.stat("trees/consumed") == 0


# ------------------------------------------------------------------------------------------- the end


def test_when_the_learner_is_done_live_leases_are_revoked_and_the_actors_dismissed() -> None:
    rig = Rig(small(max_policy_lag=1))
    rig.learner()
    actor = rig.actor(slots=4)
    rig.inspect(actor)
    leases = rig.leases(actor)
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


def test_what_the_allocator_waits_for_has_a_name() -> None:
    rig = Rig(small(batch_trees=1))
    assert rig.core.waiting() == "learner"
    rig.learner(credit=0)
    assert rig.core.waiting() == "actors"
    actor = rig.actor(slots=2)
    rig.inspect(actor)
    assert rig.core.waiting() == "working"
    rig.work(actor)
    assert rig.core.waiting() == "credit"


def test_an_open_anchor_is_one_that_did_not_end_the_world() -> None:
    rig, actor, (lease, *_) = granted()
    rig.start(actor, lease)
    rig.expand(actor, lease, 0)
    rig.expand(actor, lease, 1, last=True)
    tree = rig.core.state.forest.trees[lease.id.tree]
    assert tree.anchors() == [0, 1]
    assert tree.nodes[2].turn.status is TurnStatus.TERMINATED
    assert tree.in_flight(0) == 2


def test_grants_are_cut_by_size() -> None:
    rig = Rig(small(batch_trees=3), continuations=64)
    rig.learner()
    actor = rig.actor(slots=200)
    for message in rig.take(actor, Inspect):
        heavy = msgspec.structs.replace(ROOT, snapshot=bytes(1 << 20))
        rig.say(actor, Inspected(message.tree, message.task, heavy))
    grants = rig.take(actor, Grant)
    assert sum(len(grant.leases) for grant in grants) == 192
    assert max(len(grant.leases) for grant in grants) <= 4


def test_an_actor_that_lacks_what_the_rule_needs_is_refused() -> None:
    rig = Rig()
    rig.core.state.rule.requires = frozenset({"features"})  # type: ignore[misc]
    rig.say("a/1", hello("actor", "a/1", slots=1))
    assert "features" in rig.take("a/1", Bye)[0].reason
    assert isinstance(hello("actor", "a/1"), Hello)
