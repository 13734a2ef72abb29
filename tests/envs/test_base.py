"""The replaying base class and the registry."""

from __future__ import annotations

from typing import ClassVar

import pytest

from common.errors import ConfigError, EnvironmentFault
from common.nouns import TaskId
from common.seeds import derive_seed
from envs.base import ReplayEnvironment, Step
from envs.registry import ENVIRONMENTS, environment_class, make_env

TASK = TaskId(env="dice", split="train", index=3)


class Dice(ReplayEnvironment):
    """Adds seeded throws to a sum; `leaky` lets the class-wide number of throws into it."""

    name: ClassVar[str] = "dice"
    throws: ClassVar[int] = 0
    action_format = "Answer with throw."
    words = ("throw",)
    max_turns = 4

    def __init__(self, leaky: bool = False) -> None:
        self.leaky, self.total, self.turns = leaky, 0, 0

    def _reset(self, task: TaskId) -> str:
        self.total, self.turns = task.index, 0
        return f"sum {self.total}"

    def _step(self, action: str, seed: int) -> Step:
        Dice.throws += 1
        self.total += derive_seed(seed) % 6 + (Dice.throws if self.leaky else 0)
        self.turns += 1
        return Step(f"sum {self.total}", 0.0, False, self.turns >= self.max_turns)

    def state_hash(self) -> str:
        return f"{self.total}/{self.turns}"


def test_a_replayed_fork_has_the_state_of_its_origin_and_goes_on_like_it() -> None:
    origin, fork = Dice(), Dice()
    origin.reset(TASK)
    for seed in (5, 9):
        origin.step("throw", seed)
    fork.restore(origin.snapshot())
    assert fork.state_hash() == origin.state_hash()
    assert fork.snapshot() == origin.snapshot()
    assert fork.step("throw", 11) == origin.step("throw", 11)


def test_a_fork_of_a_replayed_fork_remembers_the_whole_way() -> None:
    first, second, third = Dice(), Dice(), Dice()
    first.reset(TASK)
    first.step("throw", 1)
    second.restore(first.snapshot())
    second.step("throw", 2)
    third.restore(second.snapshot())
    assert third.state_hash() == second.state_hash() != first.state_hash()


def test_a_reset_forgets_the_history_of_the_last_episode() -> None:
    world, fork = Dice(), Dice()
    world.reset(TASK)
    world.step("throw", 1)
    world.reset(TASK)
    fork.restore(world.snapshot())
    assert fork.turns == 0


def test_a_world_that_draws_chance_of_its_own_is_found_out_when_it_is_restored() -> None:
    origin = Dice(leaky=True)
    origin.reset(TASK)
    origin.step("throw", 1)
    with pytest.raises(EnvironmentFault, match=r"replaying 1 steps of dice/train/3"):
        Dice(leaky=True).restore(origin.snapshot())


def test_snapshots_of_another_environment_or_of_nothing_are_refused() -> None:
    class Coins(Dice):
        name: ClassVar[str] = "coins"

    coins = Coins()
    coins.reset(TASK)
    with pytest.raises(EnvironmentFault, match="written by 'coins'"):
        Dice().restore(coins.snapshot())
    with pytest.raises(EnvironmentFault, match="not one of its snapshots"):
        Dice().restore(b"noise")


def test_stepping_or_copying_before_the_first_reset_is_a_fault_not_a_zero_reward() -> None:
    with pytest.raises(EnvironmentFault, match="before reset"):
        Dice().step("throw", 0)
    with pytest.raises(EnvironmentFault, match="before the first reset"):
        Dice().snapshot()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_registered_environment_carries_its_registry_name(name: str) -> None:
    assert environment_class(name).name == name


def test_an_unknown_environment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"env.name='frozen_lake'.*did you mean 'frozenlake'"):
        make_env("frozen_lake", {})


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"env.max_turn .*did you mean 'max_turns'"):
        make_env("frozenlake", {"max_turn": 3})


def test_options_reach_the_environment() -> None:
    assert make_env("frozenlake", {"size": 5, "max_turns": 7}).max_turns == 7
