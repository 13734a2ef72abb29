import json
from pathlib import Path

import pytest

from actors.build import build_engine, build_tools, has_process_score
from common.config import Config, EngineConfig
from common.errors import ConfigError
from common.tokenizer import WordTokenizer
from envs.base import Environment
from tests.actors.fakes import LAKE, TOKENIZER, FakeEngine, lake, make_world


def test_how_long_a_context_may_be_is_read_from_the_model_and_not_from_the_actors_settings(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 77}))
    config = Config()
    assert config.model.max_context != 77
    assert build_engine(config, tmp_path).capabilities.max_context == 77


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"max_position_embeddings": "long"}'])
def test_a_model_without_that_number_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        build_engine(Config(), tmp_path)


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.name must be torch"):
        build_engine(Config(engine=EngineConfig(name="steam")), tmp_path)


@pytest.mark.parametrize("wanted, offered, described", [(0, 4, False), (4, 0, False), (4, 4, True)])
def test_prefixes_are_described_only_where_that_is_wanted_and_possible(
    wanted: int, offered: int, described: bool
) -> None:
    engine = FakeEngine(lambda context, seed: [TOKENIZER.end_id], features=offered)
    tools = build_tools(Config(env=LAKE, engine=EngineConfig(features=wanted)), engine, TOKENIZER)
    assert tools.features is described


def test_a_tokenizer_made_for_a_smaller_lake_is_refused_with_the_remedy() -> None:
    tokenizer = WordTokenizer.build(make_world(lake(size=3)).words)
    engine = FakeEngine(lambda context, seed: [tokenizer.end_id])
    with pytest.raises(
        ConfigError, match=r"does not fit env\.name=frozenlake: 'd1' is not .* role=warmstart"
    ):
        build_tools(Config(env=lake(size=4)), engine, tokenizer)


def test_only_an_environment_that_scores_its_states_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(lake())
    assert has_process_score(world)
    monkeypatch.setattr(type(world), "process_score", Environment.process_score)
    assert not has_process_score(world)
