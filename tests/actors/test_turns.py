from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.turns import status_of, version_runs
from common.nouns import Turn, TurnStatus, Version, ids_to_bytes
from envs.base import Step
from tests.actors.fakes import FakeEngine, lake, make_tools


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
