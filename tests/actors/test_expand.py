"""What a lease reports that nothing disturbs: its start, its turns and its one end."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from actors.expand import expand
from actors.lease_table import Attempt
from common.messages import Finished, HorizonReached, Message, Starting
from common.nouns import Ending, LeaseId, TurnStatus, Version, floats, ids
from common.seeds import turn_seed
from tests.actors.fakes import (
    LAKE,
    TOKENIZER,
    FakeEngine,
    always,
    lake,
    make_tools,
    random_walk,
    root_lease,
    scripted,
)
from tests.actors.leases import reaching, run, turns, walk
from tests.actors.ring import in_a_loop


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
    engine = FakeEngine(always(TOKENIZER, "up"), max_context=prompt + 10)
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


def test_two_continuations_of_one_anchor_differ_on_ice_and_each_is_reproducible() -> None:
    config = lake(is_slippery=True)
    tools = make_tools(FakeEngine(always(TOKENIZER, "right")), config)
    seen = []
    for number in (0, 1, 2, 3, 0):
        lease = root_lease(config, TOKENIZER, index=5, number=number)
        seen.append([m.turn.observation for m in turns(run(lease, tools))])
    assert seen[0] == seen[4]
    assert len({tuple(path) for path in seen}) > 1


def test_features_describe_the_prefix_after_the_observation_of_open_turns_only() -> None:
    config = lake(max_turns=3)
    engine = FakeEngine(scripted(TOKENIZER, "up", "up", "up"), features=2)
    lease = root_lease(config, TOKENIZER)
    sent = run(lease, make_tools(engine, config))
    described = [m.turn.features for m in turns(sent)]
    assert described[-1] is None and all(described[:-1])
    assert engine.described == [request.context.tolist() for request in engine.requests[1:]]


@in_a_loop
async def test_scoring_probes_between_turns_changes_no_sampled_context() -> None:
    lease = root_lease(LAKE, TOKENIZER)

    async def contexts(probing: bool) -> list[list[int]]:
        engine = FakeEngine(random_walk(TOKENIZER))
        sent: list[Message] = []
        task = asyncio.create_task(expand(Attempt(lease, 0.0), make_tools(engine, LAKE), sent.append))
        while not task.done():
            if probing and engine.requests:
                await engine.score(engine.requests[-1].context, ids(lease.prefix))
            await asyncio.sleep(0)
        return [request.context.tolist() for request in engine.requests]

    assert await contexts(probing=True) == await contexts(probing=False)
