"""A lease that goes on from turns that were taken before: a retry, and a world that has to be replayed."""

import asyncio

import msgspec
import pytest

from actors.restore import Worlds
from actors.turns import Tools, inspect_root
from common.messages import Failed, Finished, HorizonReached
from common.nouns import LeaseId, Segment, TaskId
from common.tokenizer import WordTokenizer
from envs.base import ReplayEnvironment, Step
from tests.actors.fakes import (
    TOKENIZER,
    FakeEngine,
    always,
    lake,
    make_tools,
    random_walk,
    root_lease,
    scripted,
)
from tests.actors.leases import resumed, run, turns, walk


@pytest.mark.parametrize("slippery", [False, True])
@pytest.mark.parametrize("index", range(6))
def test_a_retry_from_any_turn_equals_the_undisturbed_lease_turn_for_turn(index: int, slippery: bool) -> None:
    config = lake(is_slippery=slippery)
    lease, _, whole = walk(config, index=index, tree=index)
    for done in range(len(turns(whole)) + 1):
        retry = resumed(lease, turns(whole)[:done])
        again = run(retry, make_tools(FakeEngine(random_walk(TOKENIZER)), config))
        assert [(m.offset, m.turn) for m in turns(again)] == [(m.offset, m.turn) for m in turns(whole)[done:]]
        end, undisturbed = again[-1], whole[-1]
        assert isinstance(end, Finished) and isinstance(undisturbed, Finished)
        assert (end.turns, end.outcome, end.lease.epoch) == (undisturbed.turns, undisturbed.outcome, 1)


def test_a_retry_whose_horizon_was_already_run_only_says_so() -> None:
    config = lake()
    lease = root_lease(config, TOKENIZER, horizon=2)
    whole = run(lease, make_tools(FakeEngine(scripted(TOKENIZER, "up", "up")), config))
    engine = FakeEngine(scripted(TOKENIZER))
    again = run(resumed(lease, turns(whole)), make_tools(engine, config))
    assert again == [HorizonReached(LeaseId(0, 0, 1), 2)] and engine.requests == []


class Corridor(ReplayEnvironment):
    """A world that cannot be copied: three steps, the last one pays."""

    name = "corridor"
    action_format = "Answer: right."
    words = ("right", "at", "goal", "1", "2", "3")
    max_turns = 9

    def _reset(self, task: TaskId) -> str:
        self.place = 0
        return "at 1"

    def _step(self, action: str, seed: int) -> Step:
        self.place += 1
        over = self.place == 3
        return Step("goal" if over else f"at {self.place}", float(over), over, False)

    def state_hash(self) -> str:
        return f"place {self.place}"


@pytest.mark.parametrize("done", range(4))
def test_a_world_without_snapshots_is_replayed_even_behind_its_last_turn(done: int) -> None:
    tokenizer = WordTokenizer.build(Corridor.words)
    tools = Tools(FakeEngine(always(tokenizer, "right")), tokenizer, Worlds(Corridor), 1.0, 4)
    task = TaskId("corridor", "train", 0)
    root = asyncio.run(inspect_root(0, task, tools)).root
    assert root.snapshot is None
    lease = root_lease(lake(), TOKENIZER, snapshot=None, state_hash=root.state_hash, prefix=root.observation)
    lease = msgspec.structs.replace(lease, task=task)
    whole = run(lease, tools)
    assert [m.turn.snapshot for m in turns(whole)] == [None] * 3
    again = run(resumed(lease, turns(whole)[:done]), tools)
    assert [m.turn for m in turns(again)] == [m.turn for m in turns(whole)[done:]]
    end, undisturbed = again[-1], whole[-1]
    assert isinstance(end, Finished) and isinstance(undisturbed, Finished)
    assert (end.turns, end.outcome) == (undisturbed.turns, undisturbed.outcome)


def test_an_anchor_that_is_a_leaf_cannot_be_continued() -> None:
    tokenizer = WordTokenizer.build(Corridor.words)
    tools = Tools(FakeEngine(scripted(tokenizer)), tokenizer, Worlds(Corridor), 1.0, 4)
    lease = root_lease(lake(), TOKENIZER, snapshot=None, state_hash="", history=[Segment("right", 0)] * 3)
    (end,) = run(msgspec.structs.replace(lease, task=TaskId("corridor", "train", 0)), tools)
    assert isinstance(end, Failed) and "leaf" in end.reason
