"""What a person may type, and what is meant by it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import run
from common import cli
from common.config import Role
from tests.run.door import compose


@pytest.mark.parametrize("words", [["role=actor"], ["--role", "actor"], ["--role=actor"]])
def test_a_role_is_chosen_in_three_ways(words: list[str], started: list[object]) -> None:
    assert run.main(words) == 0
    assert [config.role for config in started] == [Role.ACTOR]  # type: ignore[attr-defined]


@pytest.mark.parametrize("role", Role)
def test_every_role_has_an_option_in_the_group(role: Role, started: list[object]) -> None:
    assert run.main([f"role={role.value}"]) == 0
    assert started[0].role is role  # type: ignore[attr-defined]


def test_values_are_read_as_their_settings_say() -> None:
    config = compose(
        "actor.name=007", "run='a b=c'", "learner.optimizer.lr=1", "learner.optimizer.beta1=1e-3",
        "deterministic=False", "learner.node_weight=ONCE", "audit.actor_dirs=[a,'b c']", "tracking.uri=http://h:1/?x=1",
    )  # fmt: skip
    assert config.actor.name == "007" and config.run == "a b=c" and config.tracking.uri == "http://h:1/?x=1"
    assert config.learner.optimizer.lr == 1.0 and config.learner.optimizer.beta1 == 1e-3
    assert config.deterministic is False and config.learner.node_weight.value == "once"
    assert config.audit.actor_dirs == ["a", "b c"]


@pytest.mark.parametrize(
    "word", ["node=tree=5/node=17", "replay.node=tree=5/node=17", "node='tree=5/node=17'"]
)
def test_a_node_is_named_as_logs_and_mlflow_name_it(word: str) -> None:
    config = compose("role=replay", "run=x", word)
    assert config.replay.node == "tree=5/node=17" and config.replay.wanted() == (5, 17)


def test_a_setting_may_be_repeated_with_the_same_value() -> None:
    assert compose("seed=1", "model=tiny", "seed=1", "model=tiny").seed == 1


def test_programs_that_lay_settings_over_others_keep_the_last() -> None:
    words = ["learner.steps=20", "seed=1", "learner.steps=7", "experiment=smoke"]
    assert cli.latest(words) == ["learner.steps=7", "seed=1", "experiment=smoke"]


@pytest.mark.parametrize(
    "uri",
    ["", "./mlruns", "/a/b", "http://h:5000", "https://u:p@h", "sqlite:///x.db", "mysql+pymysql://h/db"],
)
def test_places_where_mlflow_can_record_are_taken(uri: str) -> None:
    assert compose(f"tracking.uri={uri}").tracking.uri == uri


def test_the_command_line_wins_over_the_experiment() -> None:
    assert compose("experiment=smoke", "learner.steps=9").learner.steps == 9
    assert compose("experiment=smoke", "model=small").model.hidden_size == 128


def test_composing_leaves_nothing_in_the_directory(elsewhere: Path) -> None:
    before = os.getcwd()
    assert run.main(["--cfg", "job"]) == 0
    assert os.getcwd() == before and list(elsewhere.iterdir()) == []


def test_the_composed_configuration_can_be_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["experiment=smoke", "allocator/rule=random", "learner.node_weight=once", "seed=3"]
    assert run.main([*words, "--cfg", "job"]) == 0
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(capsys.readouterr().out)
    again = compose(f"run={tmp_path / 'r'}")
    again.run = ""
    assert again == compose(*words)
