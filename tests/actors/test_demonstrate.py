from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.demonstrate import FIRST_TASK, demonstrate, write_demonstrations
from common.checks import check_tree
from common.config import Config, TrackingConfig, WarmstartConfig
from common.errors import ConfigError
from common.journal import read_journal
from common.nouns import Ending, Tree, TurnStatus, ids
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from envs.base import Environment
from envs.experts import actions_of
from tests.actors.fakes import lake, make_world

CONFIG = lake(max_turns=12)
WORLD = make_world(CONFIG)
TOKENIZER = WordTokenizer.build(WORLD.words)


def trees(count: int, noise: float, seed: int = 0) -> list[Tree]:
    return [demonstrate(WORLD, TOKENIZER, number, noise, seed) for number in range(count)]


def test_an_expert_without_noise_reaches_every_goal() -> None:
    for tree in trees(30, noise=0.0):
        (chain,) = tree.continuations
        assert chain.outcome is not None
        assert (chain.outcome.reward, chain.outcome.ending) == (1.0, Ending.TERMINATED)


def test_noise_makes_the_expert_err_and_only_noise_is_no_expert() -> None:
    rates = []
    for noise in (0.3, 1.0):
        outcomes = [chain.outcome for tree in trees(80, noise) for chain in tree.continuations]
        rates.append(sum(outcome is not None and outcome.reward > 0 for outcome in outcomes) / 80)
    assert 0.5 < rates[0] < 1.0 and rates[1] < 0.4


def test_every_demonstration_is_a_sound_chain_of_valid_actions_that_end_with_the_stop_token() -> None:
    for tree in trees(30, noise=0.5):
        check_tree(tree)
        assert tree.demonstration and tree.task.split == "train" and tree.task.index >= FIRST_TASK
        assert [node.parent for node in tree.nodes] == list(range(-1, len(tree.nodes) - 1))
        for node in tree.nodes[1:]:
            turn = node.turn
            *words, last = ids(turn.action).tolist()
            assert last == TOKENIZER.end_id and TOKENIZER.decode(words) == turn.action_text
            assert turn.action_text in actions_of("frozenlake") and turn.demonstration
            assert turn.logprobs == b"" and turn.versions == []
        assert [node.turn.status for node in tree.nodes[:-1]] == [TurnStatus.OPEN] * (len(tree.nodes) - 1)
        assert tree.nodes[-1].turn.status is not TurnStatus.OPEN


def test_the_tokens_of_a_demonstration_are_those_the_world_says_when_it_is_played_again() -> None:
    for tree in trees(10, noise=0.4):
        assert TOKENIZER.decode(ids(tree.nodes[0].turn.observation).tolist()) == WORLD.reset(tree.task)
        for node in tree.nodes[1:]:
            step = WORLD.step(node.turn.action_text, node.turn.seed)
            assert TOKENIZER.decode(ids(node.turn.observation).tolist()) == step.observation


def test_a_seed_makes_the_set_and_another_makes_another() -> None:
    assert trees(10, 0.3) == trees(10, 0.3) != trees(10, 0.3, seed=1)


def test_no_demonstrated_map_is_held_out() -> None:
    held_out = {
        WORLD.map_of(msgspec.structs.replace(t.task, split="eval", index=i))
        for i, t in enumerate(trees(60, 0.0))
    }  # type: ignore[attr-defined]
    assert not held_out & {WORLD.map_of(tree.task) for tree in trees(60, 0.0)}  # type: ignore[attr-defined]


def config_of(**warmstart: Any) -> Config:
    return Config(env=CONFIG, warmstart=WarmstartConfig(**warmstart), tracking=TrackingConfig(enabled=False))


def read(run: RunDir) -> list[Tree]:
    records = list(read_journal(run.demonstrations_file))
    assert {record.kind for record in records} == {"tree"}
    return [msgspec.convert(record.fields["tree"], Tree, builtin_types=(bytes,)) for record in records]


def test_the_files_of_a_warm_start_read_back_and_a_second_writing_replaces_them(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "r")
    assert write_demonstrations(config_of(demonstrations=12, noise=0.3), run) == run.demonstrations_file
    assert read(run) == trees(12, 0.3)
    write_demonstrations(config_of(demonstrations=5, noise=0.0), run)
    assert read(run) == trees(5, 0.0)
    assert WordTokenizer.load(run.warmstart).sha256 == TOKENIZER.sha256
    assert sorted(path.name for path in run.warmstart.iterdir()) == ["demos.tw", "tokenizer.json"]


def test_an_environment_without_an_expert_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.experts.ACTION_SETS", {})
    world = make_world(CONFIG)
    with pytest.raises(ConfigError, match=r"warmstart\.noise=0"):
        demonstrate(world, TOKENIZER, 0, 1.0, 0)
    monkeypatch.setattr(type(world), "expert_action", Environment.expert_action)
    with pytest.raises(ConfigError, match="no scripted expert"):
        demonstrate(world, TOKENIZER, 0, 0.0, 0)
