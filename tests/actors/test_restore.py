import pytest

from actors.restore import Worlds, as_fault, env_factory
from common.config import EnvConfig
from common.errors import ConfigError, EnvironmentFault
from common.nouns import TaskId
from envs.base import Environment
from tests.actors.fakes import lake, make_world


def test_a_world_that_raised_is_closed_and_never_lent_again() -> None:
    config = lake()
    made: list[Environment] = []

    def make() -> Environment:
        made.append(make_world(config))
        return made[-1]

    worlds = Worlds(make)
    task = TaskId("frozenlake", "train", 0)
    with pytest.raises(ValueError), worlds.borrow(task):
        raise ValueError
    with worlds.borrow(task) as world:
        assert world is made[1]
    with worlds.borrow(task) as world:
        assert world is made[1], "a healthy one comes back"


def test_a_world_of_the_same_task_is_lent_first_and_the_idle_ones_are_bounded() -> None:
    config = lake()
    worlds = Worlds(lambda: make_world(config), keep=2)
    a, b, c = (TaskId("frozenlake", "train", index) for index in range(3))
    with worlds.borrow(a) as last, worlds.borrow(b) as second, worlds.borrow(c) as first:
        pass  # they come back in the order c, b, a
    with worlds.borrow(b) as again:
        assert again is second
    with worlds.borrow(a) as other, worlds.borrow(c) as another:
        assert other is last
        assert another is second is not first, "the oldest of three was closed; b's world serves c now"


def test_closing_closes_the_idle_ones() -> None:
    worlds = Worlds(lambda: make_world(lake()))
    task = TaskId("frozenlake", "train", 0)
    with worlds.borrow(task) as world:
        world.reset(task)
    worlds.close()
    with pytest.raises(EnvironmentFault, match="step without a running episode"):
        world.step("up", 0)


def test_whatever_a_world_raises_becomes_a_fault_that_names_the_place() -> None:
    with (
        pytest.raises(EnvironmentFault, match="task 7: the environment raised KeyError: 'x'"),
        as_fault("task 7"),
    ):
        raise KeyError("x")


def test_a_fault_of_our_own_keeps_its_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^plain$"), as_fault("task 7"):
        raise ConfigError("plain")


def test_the_sections_own_keys_are_not_options_of_the_environment() -> None:
    world = env_factory(EnvConfig(size=5, max_turns=3, faults=0.5))()
    assert (world.name, world.max_turns) == ("frozenlake", 3)


def test_a_wrong_option_is_refused_when_the_world_is_built() -> None:
    with pytest.raises(ConfigError, match=r"env\.size"):
        env_factory(EnvConfig(size=16))()
