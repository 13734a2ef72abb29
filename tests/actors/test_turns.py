import asyncio
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.turns import inspect_root, status_of, version_runs
from common.errors import ConfigError, EnvironmentFault
from common.nouns import TaskId, Turn, TurnStatus, Version, floats, ids, ids_to_bytes
from envs.base import Step
from tests.actors.fakes import TOKENIZER, FakeEngine, lake, make_tools, root_lease, scripted


@given(st.lists(st.integers(0, 3), max_size=20))
def test_version_runs_say_of_each_token_under_which_weights_it_was_sampled(steps: list[int]) -> None:
    versions = [Version(0, step) for step in steps]
    runs = version_runs(versions)
    turn = Turn(action=ids_to_bytes(list(range(len(steps)))), versions=runs)
    assert turn.token_versions() == versions
    assert all(left.version != right.version for left, right in pairwise(runs))


def test_terminated_truncated_and_open_stay_three_things_also_where_the_context_ends() -> None:
    tools = make_tools(FakeEngine(lambda context, seed: [], max_context=10), lake(), max_new_tokens=4)
    short, long = np.zeros(6, dtype=np.int32), np.zeros(7, dtype=np.int32)
    for terminated, truncated, context, expected in (
        (False, False, short, TurnStatus.OPEN),
        (False, False, long, TurnStatus.TRUNCATED),
        (False, True, short, TurnStatus.TRUNCATED),
        (True, False, short, TurnStatus.TERMINATED),
        (True, False, long, TurnStatus.TERMINATED),
    ):
        assert status_of(tools, Step("at a1", 0.0, terminated, truncated), context) is expected


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
