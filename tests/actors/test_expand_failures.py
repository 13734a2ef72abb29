"""A lease that ends without an outcome: its world or its engine fails, or it is taken back."""

import asyncio
import dataclasses
from collections.abc import Callable

from actors.expand import expand
from actors.lease_table import Attempt
from actors.restore import Worlds
from common.messages import Failed, Message
from envs.base import Environment, Step
from tests.actors.fakes import LAKE, TOKENIZER, FakeEngine, lake, make_tools, make_world, root_lease, scripted
from tests.actors.leases import reaching, run, turns, walk
from tests.actors.ring import in_a_loop
from tests.actors.servers import until


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


@in_a_loop
async def test_a_revoked_lease_stops_within_one_turn_and_counts_what_it_threw_away() -> None:
    engine = FakeEngine(scripted(TOKENIZER, *["up"] * 8))
    sent: list[Message] = []
    attempt = Attempt(root_lease(LAKE, TOKENIZER), 0.0)

    def emit(message: Message) -> None:
        sent.append(message)
        if len(sent) == 3:  # Starting and two turns: the third is about to be sampled
            engine.hold = asyncio.Event()

    task = asyncio.create_task(expand(attempt, make_tools(engine, LAKE), emit))
    await until(lambda: len(engine.requests) == 3)
    attempt.stop("too old")
    engine.abort(str(attempt.lease.id))
    assert await asyncio.wait_for(task, 5) is None
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
