import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.expand import expand
from actors.lease_table import Attempt
from actors.restore import Worlds
from actors.turns import Tools, inspect_root
from common.config import EnvConfig
from common.errors import ConfigError, EnvironmentFault
from common.messages import Expanded, Failed, Finished, HorizonReached, Message, Starting
from common.nouns import Ending, Lease, LeaseId, Segment, TaskId, TurnStatus, Version, floats, ids
from common.seeds import turn_seed
from common.tokenizer import WordTokenizer
from envs.base import Environment, ReplayEnvironment, Step
from tests.actors.fakes import FakeEngine, lake, make_tools, make_world, random_walk, root_lease, scripted

TOKENIZER = WordTokenizer.build(make_world(lake()).words)


def run(lease: Lease, tools: Tools, attempt: Attempt | None = None) -> list[Message]:
    """Everything one lease reports."""
    sent: list[Message] = []
    asyncio.run(expand(attempt or Attempt(lease, 0.0), tools, sent.append), debug=False)
    return sent


def walk(config: EnvConfig, **changes: Any) -> tuple[Lease, FakeEngine, list[Message]]:
    engine = FakeEngine(random_walk(TOKENIZER))
    lease = root_lease(config, TOKENIZER, **changes)
    return lease, engine, run(lease, make_tools(engine, config))


def turns(sent: list[Message]) -> list[Expanded]:
    return [message for message in sent if isinstance(message, Expanded)]


def resumed(lease: Lease, done: list[Expanded], epoch: int = 1) -> Lease:
    """The lease that an allocator grants after `done` turns were accepted."""
    prefix = lease.prefix + b"".join(m.turn.action + m.turn.observation for m in done)
    history = [*lease.history, *(Segment(m.turn.action_text, m.turn.seed) for m in done)]
    return msgspec.structs.replace(
        lease,
        id=LeaseId(lease.id.tree, lease.id.number, epoch),
        prefix=prefix,
        history=history,
        snapshot=done[-1].turn.snapshot if done else lease.snapshot,
        state_hash=done[-1].turn.state_hash if done else lease.state_hash,
        depth=lease.depth + len(done),
        offset=lease.offset + len(done),
    )


@given(st.integers(0, 300), st.booleans())
def test_the_context_of_each_turn_is_the_prompt_and_all_actions_and_observations_by_id(
    index: int, slippery: bool
) -> None:
    lease, engine, sent = walk(lake(is_slippery=slippery), index=index, tree=index)
    expected = ids(lease.prefix).tolist()
    assert len(engine.requests) == len(turns(sent)) > 0
    for request, message in zip(engine.requests, turns(sent), strict=True):
        assert request.context.tolist() == expected
        assert request.seed == message.turn.seed == turn_seed(lease.seed, message.offset)
        expected += ids(message.turn.action).tolist() + ids(message.turn.observation).tolist()


def test_a_lease_reports_start_turns_and_one_end_in_order_and_frees_its_session() -> None:
    lease, engine, sent = walk(lake())
    assert sent[0] == Starting(lease.id, Version(0, 0))
    assert [m.offset for m in turns(sent)] == list(range(len(sent) - 2))
    end = sent[-1]
    assert isinstance(end, Finished) and end.turns == len(turns(sent))
    assert engine.released == [str(lease.id)]


def test_a_turn_carries_what_was_sampled_with_behaviour_log_probabilities_and_versions() -> None:
    _, _, sent = walk(lake())
    for message in turns(sent):
        turn = message.turn
        count = turn.num_action_tokens
        assert len(floats(turn.logprobs)) == len(floats(turn.entropies)) == count
        assert turn.token_versions() == [Version(0, 0)] * count
        stop = turn.stop_reason == "stop"
        sampled = ids(turn.action).tolist()
        assert (sampled[-1] == TOKENIZER.end_id) == stop
        assert turn.action_text == TOKENIZER.decode(sampled[: count - stop])
        assert (
            TOKENIZER.encode(TOKENIZER.decode(ids(turn.observation).tolist()))
            == ids(turn.observation).tolist()
        )


def test_an_action_ended_by_its_length_keeps_all_its_tokens_and_wastes_the_turn() -> None:
    engine = FakeEngine(lambda context, seed: TOKENIZER.encode("down down down down down"))
    config = lake(max_turns=1)
    sent = run(root_lease(config, TOKENIZER), make_tools(engine, config))
    (message,) = turns(sent)
    assert (message.turn.stop_reason, message.turn.action_text) == ("length", "down down down down")
    assert TOKENIZER.decode(ids(message.turn.observation).tolist()).startswith("what")


def reaching(config: EnvConfig, index: int) -> list[str]:
    world = make_world(config)
    world.reset(TaskId("frozenlake", "train", index))
    path: list[str] = []
    while (action := world.expert_action()) is not None:
        path.append(action)
        world.step(action, 0)
    return path


def test_the_goal_pays_one_and_terminates() -> None:
    config = lake(max_turns=12)
    path = reaching(config, 3)
    tools = make_tools(FakeEngine(scripted(TOKENIZER, *path)), config)
    sent = run(root_lease(config, TOKENIZER, index=3), tools)
    end = sent[-1]
    assert isinstance(end, Finished)
    assert (end.outcome.reward, end.outcome.raw_reward, end.outcome.ending) == (1.0, 1.0, Ending.TERMINATED)
    last = turns(sent)[-1].turn
    assert (last.status, last.reward, last.snapshot) == (TurnStatus.TERMINATED, 1.0, None)
    assert all(m.turn.status is TurnStatus.OPEN and m.turn.snapshot for m in turns(sent)[:-1])


def test_the_turn_limit_is_a_truncation_without_reward() -> None:
    config = lake(max_turns=3)
    tools = make_tools(FakeEngine(scripted(TOKENIZER, "up", "up", "up")), config)
    sent = run(root_lease(config, TOKENIZER), tools)
    end = sent[-1]
    assert isinstance(end, Finished)
    assert (end.turns, end.outcome.reward, end.outcome.ending) == (3, 0.0, Ending.TRUNCATED)
    assert turns(sent)[-1].turn.status is TurnStatus.TRUNCATED


def test_a_turn_after_which_no_other_fits_into_the_context_is_truncated() -> None:
    config = lake(max_turns=50)
    lease = root_lease(config, TOKENIZER)
    prompt = len(ids(lease.prefix))
    # Each turn adds `up <end> at a1`: 4 tokens; room for 4 new ones is needed before each.
    engine = FakeEngine(
        lambda context, seed: [*TOKENIZER.encode("up"), TOKENIZER.end_id], max_context=prompt + 10
    )
    sent = run(lease, make_tools(engine, config))
    assert [m.turn.status for m in turns(sent)] == [TurnStatus.OPEN, TurnStatus.TRUNCATED]
    end = sent[-1]
    assert isinstance(end, Finished) and end.outcome.ending is Ending.TRUNCATED
    assert all(len(request.context) + 4 <= prompt + 10 for request in engine.requests)


def test_a_horizon_ends_an_open_continuation_after_that_many_turns() -> None:
    config = lake()
    tools = make_tools(FakeEngine(scripted(TOKENIZER, "up", "up", "up")), config)
    sent = run(root_lease(config, TOKENIZER, horizon=2), tools)
    assert len(turns(sent)) == 2
    assert sent[-1] == HorizonReached(LeaseId(0, 0, 0), 2)


def test_an_episode_that_ends_on_its_horizon_is_finished_and_not_cut() -> None:
    config = lake(max_turns=2)
    tools = make_tools(FakeEngine(scripted(TOKENIZER, "up", "up")), config)
    sent = run(root_lease(config, TOKENIZER, horizon=2), tools)
    assert isinstance(sent[-1], Finished)


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


def test_two_continuations_of_one_anchor_differ_on_ice_and_each_is_reproducible() -> None:
    config = lake(is_slippery=True)
    policy: Callable[[list[int], int], list[int]] = lambda context, seed: [  # noqa: E731
        *TOKENIZER.encode("right"),
        TOKENIZER.end_id,
    ]
    seen = []
    for number in (0, 1, 2, 3, 0):
        lease = root_lease(config, TOKENIZER, index=5, number=number)
        seen.append([m.turn.observation for m in turns(run(lease, make_tools(FakeEngine(policy), config)))])
    assert seen[0] == seen[4]
    assert len({tuple(path) for path in seen}) > 1


def broken(make: Callable[[], Environment], at: int) -> Callable[[], Environment]:
    """Worlds whose `at`-th step raises something that no one expects."""

    def build() -> Environment:
        world = make()
        plain, count = world.step, 0

        def step(action: str, seed: int) -> Step:
            nonlocal count
            count += 1
            if count == at:
                raise ZeroDivisionError("ice")
            return plain(action, seed)

        world.step = step  # type: ignore[method-assign]
        return world

    return build


def test_an_environment_that_raises_is_a_failure_to_retry_and_never_an_outcome() -> None:
    config = lake()
    tools = make_tools(FakeEngine(scripted(TOKENIZER, "up", "up", "up")), config)
    tools = dataclasses.replace(tools, worlds=Worlds(broken(lambda: make_world(config), at=2)))
    sent = run(root_lease(config, TOKENIZER), tools)
    end = sent[-1]
    assert [type(m).__name__ for m in sent] == ["Starting", "Expanded", "Failed"]
    assert isinstance(end, Failed) and end.retry and "ZeroDivisionError: ice" in end.reason
    assert end.discarded_tokens == 2, "the action sampled for the step that raised"


def test_planted_faults_fail_an_attempt_and_spare_another_with_the_same_draws() -> None:
    config = lake(faults=0.2, max_turns=4)
    lost = won = 0
    for index in range(12):
        plain = walk(lake(max_turns=4), index=index, tree=index)[2]
        for epoch in range(30):
            _, _, sent = walk(config, index=index, tree=index, epoch=epoch)
            if isinstance(sent[-1], Failed):
                assert "planted fault" in sent[-1].reason and sent[-1].retry
                lost += 1
                continue
            assert [m.turn for m in turns(sent)] == [m.turn for m in turns(plain)]
            won += 1
            break
    assert lost > 3 and won == 12


def test_a_world_that_restores_to_another_state_is_a_failure_to_retry() -> None:
    config = lake()
    lease = root_lease(config, TOKENIZER, state_hash="0" * 64)
    sent = run(lease, make_tools(FakeEngine(scripted(TOKENIZER)), config))
    (end,) = sent
    assert isinstance(end, Failed) and end.retry and "did not restore" in end.reason


def test_a_snapshot_of_other_options_is_a_failure_and_no_crash() -> None:
    lease = root_lease(lake(is_slippery=True), TOKENIZER)
    (end,) = run(lease, make_tools(FakeEngine(scripted(TOKENIZER)), lake()))
    assert isinstance(end, Failed) and "is_slippery" in end.reason


def test_a_dead_engine_is_a_failure_to_retry() -> None:
    config = lake()
    engine = FakeEngine(scripted(TOKENIZER))
    engine.dead = True
    sent = run(root_lease(config, TOKENIZER), make_tools(engine, config))
    end = sent[-1]
    assert isinstance(end, Failed) and end.retry and end.reason == "the engine died"


def test_a_revoked_lease_stops_within_one_turn_and_counts_what_it_threw_away() -> None:
    config = lake()

    async def scenario() -> list[Message]:
        engine = FakeEngine(scripted(TOKENIZER, *["up"] * 8))
        sent: list[Message] = []
        attempt = Attempt(root_lease(config, TOKENIZER), 0.0)

        def emit(message: Message) -> None:
            sent.append(message)
            if len(sent) == 3:  # Starting and two turns: the third is about to be sampled
                engine.hold = asyncio.Event()

        task = asyncio.create_task(expand(attempt, make_tools(engine, config), emit))
        while len(engine.requests) < 3:
            await asyncio.sleep(0.001)
        attempt.stop("too old")
        engine.abort(str(attempt.lease.id))
        assert await asyncio.wait_for(task, 5) is None
        return sent

    sent = asyncio.run(scenario())
    assert [type(m).__name__ for m in sent] == ["Starting", "Expanded", "Expanded", "Failed"]
    end = sent[-1]
    assert isinstance(end, Failed)
    assert (end.reason, end.retry, end.discarded_tokens) == ("too old", False, 1)


def test_a_turn_that_crosses_its_revoke_is_discarded_even_if_it_reached_the_goal() -> None:
    config = lake(max_turns=12)
    path = reaching(config, 3)
    attempt = Attempt(root_lease(config, TOKENIZER, index=3), 0.0)
    rest = list(path)

    def policy(context: list[int], seed: int) -> list[int]:
        if len(rest) == 1:
            attempt.stop("too old")
        return [*TOKENIZER.encode(rest.pop(0)), TOKENIZER.end_id]

    sent = run(attempt.lease, make_tools(FakeEngine(policy), config), attempt)
    assert len(turns(sent)) == len(path) - 1
    end = sent[-1]
    assert isinstance(end, Failed) and (end.retry, end.discarded_tokens) == (False, 2)


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
    engine = FakeEngine(lambda context, seed: [*tokenizer.encode("right"), tokenizer.end_id])
    tools = Tools(engine, tokenizer, Worlds(Corridor), 1.0, 4)
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


def test_features_describe_the_prefix_after_the_observation_of_open_turns_only() -> None:
    config = lake(max_turns=3)
    engine = FakeEngine(scripted(TOKENIZER, "up", "up", "up"), features=2)
    lease = root_lease(config, TOKENIZER)
    sent = run(lease, make_tools(engine, config))
    described = [m.turn.features for m in turns(sent)]
    assert described[-1] is None and all(described[:-1])
    assert engine.described == [request.context.tolist() for request in engine.requests[1:]]


def test_inspecting_describes_the_root_and_samples_nothing() -> None:
    config = lake()
    engine = FakeEngine(scripted(TOKENIZER), features=2)
    task = TaskId("frozenlake", "train", 4)
    inspected = asyncio.run(inspect_root(9, task, make_tools(engine, config)))
    lease = root_lease(config, TOKENIZER, index=4)
    assert (inspected.tree, inspected.task) == (9, task)
    assert inspected.root.observation == lease.prefix
    assert (inspected.root.snapshot, inspected.root.state_hash) == (lease.snapshot, lease.state_hash)
    assert inspected.root.action == b"" and inspected.root.versions == [] and engine.requests == []
    assert inspected.root.features is not None and floats(inspected.root.features).tolist()[0] == len(
        ids(lease.prefix)
    )


def test_a_prompt_that_leaves_no_room_is_refused_with_the_remedy() -> None:
    tools = make_tools(FakeEngine(scripted(TOKENIZER), max_context=8), lake())
    with pytest.raises(EnvironmentFault, match=r"raise model\.max_context"):
        asyncio.run(inspect_root(0, TaskId("frozenlake", "train", 0), tools))


def test_an_unknown_split_is_refused() -> None:
    tools = make_tools(FakeEngine(scripted(TOKENIZER)), lake())
    with pytest.raises(ConfigError, match="splits are"):
        asyncio.run(inspect_root(0, TaskId("frozenlake", "test", 0), tools))


def test_scoring_probes_between_turns_changes_no_sampled_context() -> None:
    config = lake()

    async def scenario(probing: bool) -> list[list[int]]:
        engine = FakeEngine(random_walk(TOKENIZER))
        tools = make_tools(engine, config)
        sent: list[Message] = []
        task = asyncio.create_task(expand(Attempt(root_lease(config, TOKENIZER), 0.0), tools, sent.append))
        while not task.done():
            if probing and engine.requests:
                await engine.score(engine.requests[-1].context, ids(root_lease(config, TOKENIZER).prefix))
            await asyncio.sleep(0)
        return [request.context.tolist() for request in engine.requests]

    assert asyncio.run(scenario(probing=True)) == asyncio.run(scenario(probing=False))
