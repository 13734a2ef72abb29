"""Every file under configs/ is parsed, chosen once, validated, and survives the way to another process."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

import run
from common import cli
from common.config import (
    BEHAVIOUR_WEIGHTS,
    BUDGETS,
    CREDITS,
    ENGINES,
    ENVIRONMENTS,
    GROUP_FILTERS,
    HELD_OUT,
    LOSSES,
    RULES,
    SPLITS,
    Config,
)
from common.config_allocator import PREDICTORS
from common.config_backend import BACKENDS
from common.errors import ConfigError
from common.nouns import TaskId
from common.settings import NAMED_GROUPS, convert, overrides, settings, to_text
from envs.registry import make_env
from tests.run.door import compose

GROUPS = cli.groups(run.CONFIGS)
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() for option in options]
FILES = sorted(run.CONFIGS.rglob("*.yaml"))

composed = functools.cache(compose)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(run.CONFIGS).as_posix())
def test_every_file_is_yaml_and_says_what_it_is_for(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()) or {}, dict)
    if path.parent != run.CONFIGS:
        group = path.parent.relative_to(run.CONFIGS).as_posix()
        assert GROUPS[group][path.stem], "its first comment line is its description in --help"


@pytest.mark.parametrize("word", OPTIONS)
def test_every_option_composes_and_is_valid_and_reaches_a_child_unchanged(word: str) -> None:
    config = composed(word)
    assert composed(*overrides(config)) == config


def test_every_group_has_a_default_that_exists() -> None:
    chosen = cli.default_choices(run.CONFIGS)
    assert chosen.keys() == GROUPS.keys()
    assert all(option in GROUPS[group] for group, option in chosen.items())


def test_what_is_implemented_is_what_can_be_chosen() -> None:
    names = (
        ENVIRONMENTS,
        ENGINES,
        BUDGETS,
        PREDICTORS,
        RULES,
        BACKENDS,
        CREDITS,
        GROUP_FILTERS,
        LOSSES,
        BEHAVIOUR_WEIGHTS,
    )
    for group, valid in zip(NAMED_GROUPS, names, strict=True):
        assert set(valid) <= set(GROUPS[group]), (
            f"{group}: every name is also an option, so that a run can be reopened"
        )
        for option in GROUPS[group]:
            node: Any = composed(f"{group}={option}")
            for part in group.split("/"):
                node = getattr(node, part)
            assert node.name in valid and (option not in valid or node.name == option)
    assert set(run.RULE_SCHEMAS) == set(RULES) and set(run.BUDGET_SCHEMAS) == set(BUDGETS)


def test_the_splits_that_can_be_chosen_are_those_of_the_environment() -> None:
    assert SPLITS.keys() == set(ENVIRONMENTS)
    for name, splits in SPLITS.items():
        world = make_env(name, {})
        assert HELD_OUT in splits
        for split in splits:
            assert world.reset(TaskId(name, split, 0))
        with pytest.raises(ConfigError, match=f"its splits are {', '.join(splits)}"):
            world.reset(TaskId(name, "test", 0))


def test_the_experiments_fit_every_rule_and_credit() -> None:
    for experiment in GROUPS["experiment"]:
        for rule in GROUPS["allocator/rule"]:
            name = composed(f"experiment={experiment}", f"allocator/rule={rule}").allocator.rule.name
            assert name == (rule if rule in RULES else {"at2po": "entropy"}[rule])


@pytest.mark.parametrize("choice", ["budget=trace_roots", "budget=adaptive", "rule=trace", "rule=uucb"])
def test_what_lives_on_predictions_brings_the_learned_predictor_unless_another_is_chosen(choice: str) -> None:
    assert composed(f"allocator/{choice}").allocator.predictor.name == "shared"
    chosen = composed(f"allocator/{choice}", "allocator/predictor=history")
    assert chosen.allocator.predictor.name == "history"
    assert composed().allocator.predictor.name == "history"


def test_a_configuration_full_of_odd_values_reaches_a_child_unchanged() -> None:
    config = compose(
        "allocator/rule=random", "allocator.rule.chains=1", "allocator.rule.expansions=5", "learner/weight=tis",
        "env=frozenlake_slippery", "learner.optimizer.lr=1e-07", "learner.optimizer.weight_decay=0.30000000000000004",
        "actor.name='quoted'", "tracking.uri=a=b,c [d] {e} $f ${g} #h", "actor.dir=a b", "tracking=none",
        "learner.node_weight=leaf_share", "audit.actor_dirs=[x y,z]", "seed=4611686018427387903",
    )  # fmt: skip
    assert compose(*overrides(config)) == config
    config.actor.dir, config.actor.name = "'both'", '"'
    assert compose(*overrides(config)) == config


def test_every_setting_has_a_type_that_the_command_line_can_read() -> None:
    for rule in run.RULE_SCHEMAS.values():
        config = Config()
        config.allocator.rule = rule()
        for key, kind, value in settings(config):
            assert convert(key, kind, to_text(value)) == value, key


def test_the_schema_is_the_only_place_of_defaults() -> None:
    config = compose("experiment=none")
    assert config == Config(), "config.yaml and the default options must not repeat or change default values"
