"""Which settings may differ when a run goes on, and how the others are told."""

import dataclasses

import pytest

from common.config import Config, to_plain
from common.config_learner import OptimizerConfig
from common.errors import ConfigError
from common.resuming import FREE, FREE_WITH_TORCH, GROWING, differences, flat, refuse
from common.settings import settings


def begun() -> dict[str, object]:
    return flat(to_plain(Config()))


def changed(**sections: object) -> Config:
    return dataclasses.replace(Config(), **sections)  # type: ignore[arg-type]


def test_the_same_settings_do_not_differ() -> None:
    assert differences(begun(), Config()) == []


def test_places_waits_and_numbers_of_actors_may_differ() -> None:
    config = Config(run="x", runs_dir="elsewhere")
    config.cluster.actors, config.cluster.allocator = 7, "tcp://10.0.0.1:1"
    config.tracking.enabled, config.learner.checkpoint_every = False, 3
    assert differences(begun(), config) == []


def test_every_setting_that_must_not_differ_is_named_with_both_values() -> None:
    config = changed(seed=4)
    config.env.size, config.learner.optimizer = 5, OptimizerConfig(lr=0.5)
    with pytest.raises(ConfigError) as raised:
        refuse("runs/x", differences(begun(), config))
    said = str(raised.value)
    for part in ("seed must be 0, got 4", "env.size must be 4, got 5", "lr must be 0.0003, got 0.5"):
        assert part in said
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("steps, told", [(99, ["learner.steps must be 100 or more, got 99"]), (101, [])])
def test_a_run_may_become_longer_and_not_shorter(steps: int, told: list[str]) -> None:
    config = Config()
    config.learner.steps = steps
    assert [str(each) for each in differences(begun(), config)] == told


def test_settings_of_another_release_are_passed_over() -> None:
    recorded = {**begun(), "learner.gone": 3}
    del recorded["learner.batch_trees"]
    config = Config()
    config.learner.batch_trees = 77
    assert differences(recorded, config) == []


def test_what_may_change_is_a_setting() -> None:
    keys = [key for key, _, _ in settings(Config())]
    for name in (*FREE, *FREE_WITH_TORCH, *GROWING):
        assert any(key.startswith(name) for key in keys), name


def test_how_an_update_is_computed_may_change() -> None:
    config = Config()
    backend = config.learner.backend
    backend.collective_timeout_s, backend.device, backend.gradient_checkpointing = 9.0, "cpu", True
    assert differences(begun(), config) == []


@pytest.mark.parametrize("name, told", [("torch", []), ("deepspeed", ["learner.backend.processes"])])
def test_the_number_of_ranks_may_change_where_one_of_them_saves_everything(
    name: str, told: list[str]
) -> None:
    config = Config()
    config.learner.backend.name = name
    recorded = flat(to_plain(config))
    config.learner.backend.processes = 2
    assert [each.key for each in differences(recorded, config)] == told


def test_the_weights_a_run_started_from_stay_named_since_they_may_be_its_reference() -> None:
    config = Config()
    config.model.path = "elsewhere"
    assert [str(each) for each in differences(begun(), config)] == ["model.path must be '', got elsewhere"]
