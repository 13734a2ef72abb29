"""Who gets which leases, and with what weights they may start: those that the update of their tree trains."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest

from allocator.granting import oldest_start
from common.messages import Expanded, Failed, Finished, Grant, Inspect, Inspected, Revoke, Starting, TreeReady
from common.nouns import Lease, LeaseId, Tree, Version, VersionRun
from common.staleness import policy_lag
from tests.allocator.harness import LEARNER, ROOT, Rig, granted, ready, small, turn, win

# ------------------------------------------------------------------------------------------- one lease


@pytest.mark.parametrize("lag", range(5))
def test_the_oldest_start_is_the_oldest_that_the_update_of_the_tree_trains(lag: int) -> None:
    """Searched for: the first version, none newer than there is, that is young enough at the update."""
    for step in range(8):
        for wave in range(12):
            at = Version(3, max(step, wave))
            young = [v for v in range(step + 1) if policy_lag(at, Version(3, v)) <= lag]
            assert oldest_start(Version(3, step), wave, lag) == Version(3, young[0] if young else step)


def leases_at(rig: Rig, actor: str) -> dict[int, Lease]:
    """The leases there are now, one a tree."""
    found: dict[int, Lease] = {}
    while True:
        rig.inspect(actor)
        new = {lease.id.tree: lease for lease in rig.leases(actor)}
        if not new:
            return found
        found |= new


def test_a_lease_may_start_with_weights_k_versions_older_than_those_at_the_update_of_its_tree() -> None:
    rig, actor = ready(small(steps=9, batch_trees=1, max_policy_lag=2), continuations=1)
    first = leases_at(rig, actor)
    assert {tree: lease.min_version.step for tree, lease in first.items()} == {0: 0, 1: 0, 2: 0}
    rig.finish(actor, first[0])
    rig.consume([0], 1)
    (ahead,) = leases_at(rig, actor).values()
    assert ahead.id.tree == 3 and ahead.min_version == Version(0, 1), "it is trained at step 3, not at 1"


def test_a_retry_is_asked_for_what_will_be_trained_when_it_begins() -> None:
    """On schedule the bound is that of the tree's wave; a tree that is late follows the learner."""
    rig, actor = ready(small(steps=9, batch_trees=1, max_policy_lag=1), continuations=1, slots=16)
    slow = leases_at(rig, actor)[1]
    found = []
    for step in range(4):
        rig.start(actor, slow)
        rig.say(actor, Failed(slow.id, "drill", True))
        slow = leases_at(rig, actor)[1]
        found.append(slow.min_version.step)
        rig.core.state.forest.trees[1].branches[0].failures = 0
        rig.consume([], step + 1)
    assert slow.id.epoch == 4 and found == [0, 0, 1, 2]


def test_after_a_learner_fell_back_a_lease_needs_no_weights_that_do_not_exist() -> None:
    rig, actor = ready(small(steps=9, batch_trees=1, max_policy_lag=1), continuations=1, slots=16)
    open_leases = leases_at(rig, actor)
    for step in range(3):
        rig.finish(actor, open_leases.pop(step))
        rig.consume([step], step + 1)
        open_leases |= leases_at(rig, actor)
    assert open_leases[4].min_version == Version(0, 3)
    rig.learner(step=1, lineage=1, incarnation="2")
    rig.start(actor, open_leases[4])
    rig.say(actor, Failed(open_leases[4].id, "drill", True))
    assert leases_at(rig, actor)[4].min_version == Version(1, 1)


def test_a_lease_may_not_start_with_weights_older_than_the_learner_trains() -> None:
    rig = Rig(small(steps=9, batch_trees=1, max_policy_lag=2))
    rig.learner(step=5)
    actor = rig.actor()
    rig.inspect(actor)
    assert {lease.min_version for lease in rig.leases(actor)} == {Version(0, 3)}


# ------------------------------------------------------------------------------------------ spreading work


def test_leases_go_to_the_actor_with_the_lowest_load() -> None:
    rig = Rig(small(batch_trees=4), continuations=4)
    rig.learner()
    small_one, large = rig.actor("a/1", slots=2), rig.actor("b/1", slots=8)
    for actor in (small_one, large, small_one, large):
        rig.inspect(actor)
    held = {actor: len(rig.leases(actor)) for actor in (small_one, large)}
    assert held == {small_one: 2, large: 8}


def test_a_late_actor_gets_work_though_all_of_it_was_granted_before_it_came() -> None:
    rig, early, leases = granted(small(batch_trees=1), slots=1, prefetch=8)
    rig.start(early, leases[0])
    late = rig.actor("b/1", slots=4)
    rig.tick(0.2)
    (taken,) = rig.leases(late)
    assert taken.id == LeaseId(0, 1, 1) and taken.seed == leases[1].seed
    assert [r.lease for r in rig.take(early, Revoke)] == [leases[1].id]
    assert rig.start(early, leases[1]).ack  # it crosses the revoke
    assert rig.stat("events/crossed") == 1 and rig.stat("leases/running") == 1


def test_grants_are_cut_by_size() -> None:
    rig, actor = ready(small(batch_trees=3), continuations=64, slots=200)
    for message in rig.take(actor, Inspect):
        heavy = msgspec.structs.replace(ROOT, snapshot=bytes(1 << 20))
        rig.say(actor, Inspected(message.tree, message.task, heavy))
    grants = rig.take(actor, Grant)
    assert sum(len(grant.leases) for grant in grants) == 192
    assert max(len(grant.leases) for grant in grants) <= 4


# ---------------------------------------------------------------------------------------- a whole run

STEPS, BATCH, TURNS = 12, 3, 3


@dataclass
class Held:
    """A lease at the actor; `turns` were sampled."""

    lease: Lease
    turns: int
    started: bool = False


@dataclass
class LateActor:
    """Weights reach it a moment after the leases that their publication made room for. Its continuations
    are as slow as they may be: they begin at once and go on only when their tree is about to be trained."""

    rig: Rig
    key: str
    draws: random.Random
    version: Version = field(default=Version(0, 0))
    held: list[Held] = field(default_factory=list)
    waited: int = 0

    def take(self) -> None:
        """Set trees up, and start what may start under the weights that are here."""
        self.rig.inspect(self.key)
        self.held += [Held(lease, lease.offset) for lease in self.rig.leases(self.key)]
        for one in [one for one in self.held if not one.started]:
            if one.lease.min_version > self.version:
                self.waited += 1
                continue
            one.started = True
            self.rig.say(self.key, Starting(one.lease.id, self.version))
            self.turn(one)

    def turn(self, one: Held) -> None:
        sampled = turn(one.lease, one.turns, last=one.turns == TURNS - 1)
        mine = msgspec.structs.replace(sampled, versions=[VersionRun(self.version, 1)])
        assert self.rig.say(self.key, Expanded(one.lease.id, one.turns, mine)).ack
        one.turns += 1

    def end(self, wave: int) -> None:
        """The trees of a wave are wanted now: all their continuations, some at the second attempt."""
        while mine := [one for one in self.held if one.lease.id.tree // BATCH == wave]:
            for one in mine:
                assert one.started, "nothing waits for weights that were published long ago"
                self.held.remove(one)
                if one.lease.id.epoch == 0 and one.turns < TURNS and self.draws.random() < 0.3:
                    self.rig.say(self.key, Failed(one.lease.id, "drill", True))
                    continue
                while one.turns < TURNS:
                    self.turn(one)
                self.rig.say(self.key, Finished(one.lease.id, TURNS, win()))
            self.take()


def stale_tokens(trees: list[Tree], at: Version, lag: int) -> int:
    versions = [v for tree in trees for node in tree.nodes for v in node.turn.token_versions()]
    assert len(versions) == BATCH * 2 * TURNS
    return sum(policy_lag(at, version) > lag for version in versions)


@pytest.mark.parametrize("lag", range(5))
def test_no_token_is_stale_by_schedule_though_actors_are_a_version_behind_for_a_moment(lag: int) -> None:
    rig, key = ready(small(steps=STEPS, batch_trees=BATCH, max_policy_lag=lag, max_attempts=9), slots=64)
    actor = LateActor(rig, key, random.Random(lag))
    actor.take()
    for step in range(STEPS):
        actor.end(wave=step)
        trees = [message.tree for message in rig.take(LEARNER, TreeReady)]
        assert [tree.wave for tree in trees] == [step] * BATCH
        assert stale_tokens(trees, Version(0, step), lag) == 0, f"in the update of step {step}"
        rig.consume([tree.id for tree in trees], step + 1)
        actor.take()
        actor.version = Version(0, step + 1)
        actor.take()
    assert not actor.held and actor.waited > 0, "some leases were held up until the weights came"
