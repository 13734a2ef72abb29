"""What a continuation earned, and what was sampled in vain: nothing depends on which attempt, or message, was lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from actors.restore import Worlds
from actors.turns import Tools, inspect_root
from allocator.settings import Settings
from benchmarks.fleet import Faults, Fleet, FleetConfig
from common.config_allocator import BudgetConfig, RandomRuleConfig
from common.messages import (
    Bye,
    Declined,
    Expanded,
    Failed,
    Finished,
    Inspect,
    Message,
    Revoke,
    TreeReady,
)
from common.nouns import Ending, Lease, Outcome, RewardSource, TaskId, Tree
from common.tokenizer import WordTokenizer
from envs.base import ReplayEnvironment, Step
from tests.actors.fakes import FakeEngine, lake, make_tools, make_world, scripted
from tests.actors.leases import run
from tests.allocator.harness import LEARNER, Rig, granted, ready, small, turn, win

# ----------------------------------------------------------------------------------- what a path earned


class Wages(ReplayEnvironment):
    """Pays in every one of its four turns: 0.5, 1.5, 2.5, 3.5."""

    name = "wages"
    words = ("work", "done")
    action_format = "Answer with one word."
    max_turns = 4

    def _reset(self, task: TaskId) -> str:
        self.turns = 0
        return "work"

    def _step(self, action: str, seed: int) -> Step:
        self.turns += 1
        return Step("done", self.turns - 0.5, self.turns == 4, False)

    def state_hash(self) -> str:
        return str(self.turns)


def played(tools: Tools, cut: int | None, env: str = "frozenlake") -> tuple[list[Finished], Tree]:
    """A tree of two continuations in a real world; with `cut` each fails after so many turns and is resumed."""
    rig, actor = ready(small(batch_trees=1, steps=1, env=env))
    for message in rig.take(actor, Inspect):
        rig.say(actor, asyncio.run(inspect_root(message.tree, message.task, tools)))
    ends: list[Finished] = []
    while leases := rig.leases(actor):
        for lease in leases:
            said = run(lease, tools)
            if cut is not None and lease.id.epoch == 0:
                said = [*said[: 1 + cut], Failed(lease.id, "drill", True)]
            for message in said:
                assert rig.say(actor, message).ack
            ends += [message for message in said if isinstance(message, Finished)]
    (delivered,) = rig.take(LEARNER, TreeReady)
    return ends, delivered.tree


def outcomes(tree: Tree) -> list[Outcome | None]:
    return [continuation.outcome for continuation in tree.continuations]


@pytest.mark.parametrize("cut", [None, 0, 1, 2, 3, 4])
def test_a_world_that_pays_every_turn_pays_a_resumed_continuation_its_whole_return(cut: int | None) -> None:
    words = WordTokenizer.build(Wages.words)
    tools = Tools(FakeEngine(scripted(words, *["work"] * 16)), words, Worlds(Wages), 1.0, 4, False)
    tree = played(tools, cut, Wages.name)[1]
    assert outcomes(tree) == [Outcome(8.0, 8.0, RewardSource.ENVIRONMENT, Ending.TERMINATED)] * 2


@pytest.mark.parametrize("cut", [None, 2, 6])
def test_what_frozen_lake_pays_at_the_goal_is_what_the_actor_says(cut: int | None) -> None:
    config = lake(size=4, hole_probability=0.0)
    words = WordTokenizer.build(make_world(config).words)
    for way, paid in ((["down"] * 3 + ["right"] * 3, 1.0), (["up"] * 12, 0.0)):
        walks = FakeEngine(lambda context, seed, way=way: scripted_at(words, way, context))
        ends, tree = played(make_tools(walks, config), cut)
        assert outcomes(tree) == [end.outcome for end in ends]
        assert [end.outcome.reward for end in ends] == [paid] * 2


def scripted_at(words: WordTokenizer, way: list[str], context: list[int]) -> list[int]:
    """The step of a way that comes next: each turn so far ended with the stop token."""
    return [*words.encode(way[context.count(words.end_id)]), words.end_id]


def test_the_return_of_an_environment_is_the_sum_of_its_turns_and_that_of_anybody_else_is_left_alone() -> (
    None
):
    judged = Outcome(0.25, 0.5, RewardSource.PSEUDO_REWARD, Ending.TRUNCATED)
    for said, expected in ((win(9.0), win(1.75)), (judged, judged)):
        rig, actor, (lease,) = granted(small(batch_trees=1, steps=1), continuations=1)
        rig.start(actor, lease)
        for offset, reward in enumerate((1.0, 0.0, 0.75)):
            rig.expand(actor, lease, offset, offset == 2, reward)
        rig.say(actor, Finished(lease.id, 3, said))
        (delivered,) = rig.take(LEARNER, TreeReady)
        assert outcomes(delivered.tree) == [expected]


# ------------------------------------------------------------------------------ what was sampled in vain


def running() -> tuple[Rig, str, Lease]:
    """A lease with one accepted turn."""
    rig, actor, (lease,) = granted(small(batch_trees=1, steps=1), continuations=1, slots=1)
    rig.start(actor, lease)
    rig.expand(actor, lease, 0)
    return rig, actor, lease


def revoked() -> tuple[Rig, str, Lease]:
    """The same, taken back because nothing more came for its deadline."""
    rig, actor, lease = running()
    rig.live(31)
    assert [message.lease for message in rig.take(actor, Revoke)] == [lease.id]
    return rig, actor, lease


def cost(rig: Rig) -> tuple[float, float]:
    return rig.stat("events/crossed_tokens"), rig.stat("events/discarded_tokens")


def later(lease: Lease, offset: int) -> Expanded:
    """A turn of three tokens."""
    return Expanded(lease.id, offset, turn(lease, offset, tokens=3))


def test_turns_and_failures_that_cross_a_revoke_are_counted_in_tokens_and_each_once() -> None:
    rig, actor, lease = revoked()
    for message in (later(lease, 0), later(lease, 1), later(lease, 2), later(lease, 1)):
        assert rig.say(actor, message).ack
    assert cost(rig) == (6, 0), "turn 0 had been accepted, turn 1 was said twice"
    for _ in range(2):
        assert rig.say(actor, Failed(lease.id, "revoked", False, discarded_tokens=2)).ack
    rig.say(actor, later(lease, 2))
    assert cost(rig) == (6, 2)


def test_a_failure_is_counted_though_its_slot_was_freed_long_before() -> None:
    """An actor that hung: it is not waited for, but what it sampled was sampled."""
    rig, actor, lease = revoked()
    rig.live(70)
    assert rig.stat("peers/room") == 0 and rig.leases(actor), "the slot went to the next attempt"
    rig.say(actor, later(lease, 1))
    rig.say(actor, Failed(lease.id, "revoked", False, discarded_tokens=2))
    assert cost(rig) == (3, 2)


def test_a_failure_that_crosses_a_fence_after_its_tree_is_gone_is_counted() -> None:
    rig, actor, lease = revoked()
    other = rig.actor("b/1")
    (again,) = rig.leases(other)
    rig.finish(other, again)
    assert rig.take(LEARNER, TreeReady)
    rig.say(actor, Failed(lease.id, "fenced", False, discarded_tokens=4))
    assert cost(rig) == (0, 4)


@pytest.mark.parametrize("end", ["finished", "declined"])
def test_whatever_ends_a_lease_that_was_taken_back_closes_its_account(end: str) -> None:
    rig, actor, lease = revoked()
    rig.say(actor, Finished(lease.id, 1, win()) if end == "finished" else Declined(lease.id, "revoked"))
    rig.say(actor, later(lease, 1))
    assert cost(rig) == (0, 0) and not rig.core.state.peers.members[actor].taken


def test_what_is_still_sampled_when_the_run_ends_is_counted() -> None:
    rig, actor, lease = running()
    rig.say(LEARNER, Bye(0, "done"))
    for offset in (0, 1, 1):
        rig.say(actor, later(lease, offset))
    rig.say(actor, Failed(lease.id, "run ended", False, discarded_tokens=2))
    assert cost(rig) == (3, 2) and rig.core.live_leases == 0
    assert not rig.core.state.peers.members[actor].taken


def test_a_failure_of_a_lease_that_the_sender_never_held_costs_nothing() -> None:
    rig, _, lease = revoked()
    other = rig.actor("b/1")
    stranger = msgspec.structs.replace(lease.id, number=7)
    rig.say(other, Failed(lease.id, "lies", False, discarded_tokens=9))
    rig.say(other, Failed(stranger, "lies", False, discarded_tokens=9))
    assert cost(rig) == (0, 0)


class Accountant(Fleet):
    """Adds up what the actors said they sampled, each turn and each failure once, and what was accepted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sampled: dict[tuple[Any, ...], int] = {}
        self.accepted = 0
        take = self.core.take_records

        def read() -> list[Any]:
            records = take()
            self.accepted += sum(f["tokens"] for kind, f in records if kind == "turn_accepted")
            return records

        self.core.take_records = read  # type: ignore[method-assign]

    def deliver(self, key: str, message: Message) -> Any:
        handled = super().deliver(key, message)
        if isinstance(message, Expanded) and handled.ack:
            self.sampled[message.lease, message.offset] = message.turn.num_action_tokens
        if isinstance(message, Failed) and handled.ack:
            self.sampled[message.lease, "discarded"] = message.discarded_tokens
        return handled


def test_in_a_fleet_all_sampled_tokens_are_accepted_crossed_or_discarded() -> None:
    """Actors hang, fail, decline, repeat themselves and are taken back their leases; none dies."""
    faults = Faults(duplicated=0.1, failed=0.05, declined=0.02, actor_pause=0.02, learner_life_s=40)
    bounds = {"max_policy_lag": 1, "max_score_staleness": 2, "lease_deadline_s": 12.0}
    shape = FleetConfig(actors=5, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=faults)
    wasted: Counter[str] = Counter()
    for seed in range(4):
        settings = Settings(steps=5, batch_trees=4, **bounds)  # type: ignore[arg-type]
        fleet = Accountant(settings, shape, RandomRuleConfig(), BudgetConfig(continuations=6), seed)
        stats = fleet.run(max_events=20_000)["stats"]
        found = Counter(
            {name: int(stats.get(f"events/{name}_tokens", 0)) for name in ("crossed", "discarded")}
        )
        assert sum(fleet.sampled.values()) == fleet.accepted + found.total()
        wasted += found
    assert wasted["crossed"] > 20 and wasted["discarded"] > 20
