import pytest

from common.errors import EnvironmentFault
from common.nouns import TaskId
from envs.faulty import FaultyEnvironment
from envs.frozenlake import FrozenLake

TASK = TaskId("frozenlake", "train", 0)


def faults(share: float, salt: str, steps: int = 2000) -> list[int]:
    """Seeds whose step raises."""
    world = FaultyEnvironment(FrozenLake(size=4, max_turns=10**6), share, salt)
    world.reset(TASK)
    found = []
    for seed in range(steps):
        try:
            world.step("nonsense", seed)
        except EnvironmentFault:
            found.append(seed)
    return found


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_the_share_of_steps_that_raise_is_the_one_asked_for(share: float) -> None:
    count = len(faults(share, "lease 0"))
    assert abs(count - 2000 * share) <= 4 * (2000 * share * (1 - share)) ** 0.5


def test_the_same_attempt_meets_the_same_faults_and_another_one_others() -> None:
    assert faults(0.2, "lease 0 attempt 0") == faults(0.2, "lease 0 attempt 0")
    assert faults(0.2, "lease 0 attempt 0") != faults(0.2, "lease 0 attempt 1")


def test_a_step_that_raises_has_not_been_played_and_all_else_is_the_inner_world() -> None:
    inner = FrozenLake(size=4, max_turns=9)
    world = FaultyEnvironment(inner, 1.0 - 1e-9)
    assert world.reset(TASK) == FrozenLake(size=4, max_turns=9).reset(TASK)
    before = world.state_hash()
    with pytest.raises(EnvironmentFault, match="planted fault"):
        world.step("down", 0)
    assert world.state_hash() == before == inner.state_hash()
    assert (world.words, world.max_turns, world.action_format) == (inner.words, 9, inner.action_format)
    assert world.process_score() == inner.process_score() and world.expert_action() == inner.expert_action()
    snapshot = world.snapshot()
    inner.step("down", 0)
    world.restore(snapshot)
    assert inner.state_hash() == before and world.gold_answer() is None
    world.close()
