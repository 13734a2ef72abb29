"""From a configuration and a folder of weights to the tools that episodes work with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from actors.engines.base import Engine
from actors.restore import Worlds, env_factory
from actors.turns import Tools
from common.config import Config
from common.errors import ConfigError
from common.tokenizer import WordTokenizer
from envs.base import Environment

if TYPE_CHECKING:
    from actors.engines.torch_engine import TorchEngine

MODEL_CONFIG = "config.json"
CONTEXT_KEY = "max_position_embeddings"


def engine_class(config: Config) -> type[TorchEngine]:
    """The configured engine. The first call imports it, which takes seconds: not in a running event loop,
    whose heartbeats would stop for as long.

    Raises:
        ConfigError: an unknown engine.
    """
    if config.engine.name != "torch":
        raise ConfigError(f"engine.name must be torch, got {config.engine.name!r}")
    from actors.engines.torch_engine import TorchEngine

    return TorchEngine


def build_engine(config: Config, folder: Path, *, greedy: bool = False) -> Engine:
    """The configured engine for the architecture in `folder`; it holds no weights until `load_weights`.

    How long a context may be is read from the model itself: an actor that joins from another machine knows
    nothing of the run's `model` section.

    Raises:
        ConfigError: an unknown engine, or a `config.json` that cannot be read.
    """
    return engine_class(config)(
        max_batch=config.engine.max_batch,
        max_context=_max_context(folder / MODEL_CONFIG),
        features=0 if greedy else config.engine.features,
        greedy=greedy,
        deterministic=config.deterministic,
    )


def build_tools(config: Config, engine: Engine, tokenizer: WordTokenizer) -> Tools:
    """Tools around `engine`.

    Raises:
        ConfigError: the environment's words are not all in the vocabulary, or its options are wrong.
    """
    make = env_factory(config.env)
    check_vocabulary(make(), tokenizer)
    return Tools(
        engine=engine,
        tokenizer=tokenizer,
        worlds=Worlds(make, config.env.faults, keep=config.engine.max_batch),
        temperature=config.engine.temperature,
        max_new_tokens=config.engine.max_new_tokens,
        features=min(config.engine.features, engine.capabilities.features) > 0,
    )


def check_vocabulary(world: Environment, tokenizer: WordTokenizer) -> None:
    """Raise `ConfigError` if the world has words that the model's tokenizer does not know."""
    try:
        tokenizer.encode(" ".join(world.words))
    except ConfigError as error:
        raise ConfigError(
            f"the model's tokenizer does not fit env.name={world.name}: {error}; use the env section that "
            "the warm start was made with, or make a new one with role=warmstart"
        ) from error


def has_process_score(world: Environment) -> bool:
    """Whether the environment has a process scorer of its own."""
    return type(world).process_score is not Environment.process_score


def _max_context(path: Path) -> int:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        limit = found[CONTEXT_KEY]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {CONTEXT_KEY} of the model from {path}: {error}") from error
    if not isinstance(limit, int) or limit < 2:
        raise ConfigError(f"{path} has {CONTEXT_KEY} {limit!r}; expected a whole number of at least 2")
    return limit
