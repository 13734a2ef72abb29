"""The learner's update equals the oracle's on the same trees, bit for bit, for every credit and weight.

The same law as in `test_ring_equals_oracle`, in one process and in seconds; what the processes add is there.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import msgspec
import pytest
import torch

from actors.engines.torch_engine import TorchEngine
from common.config import Config, EnvConfig, ModelConfig
from common.config_allocator import RandomRuleConfig
from common.config_learner import CreditConfig, LossConfig, OptimizerConfig, WeightConfig
from common.nouns import Outcome, Tree, Version
from common.tokenizer import WordTokenizer
from envs.frozenlake import FrozenLake
from learner.backend.alone import alone
from learner.policy import build_model, load_model, model_files
from learner.rows import Clock
from learner.update import Updater
from tests.oracle.loop import Oracle

TREES = 4


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    tokenizer = WordTokenizer.build(FrozenLake(size=3).words)
    small = ModelConfig(hidden_size=32, layers=2, heads=2, intermediate_size=64)
    for name, data in model_files(build_model(small, tokenizer, seed=1), tokenizer).items():
        (folder / name).write_bytes(data)
    return folder


def settings(**learner: object) -> Config:
    config = Config(env=EnvConfig(size=3, max_turns=4))
    config.allocator.rule = RandomRuleConfig(chains=2, expansions=1)
    config.allocator.budget.continuations = 4
    config.learner.batch_trees, config.learner.optimizer = TREES, OptimizerConfig(lr=0.01, warmup_steps=3)
    for name, value in learner.items():
        setattr(config.learner, name, value)
    return config


@pytest.fixture(scope="module")
def batches(start: Path) -> list[list[Tree]]:
    """Two batches under steps 0 and 1; outcomes are drawn, since this policy never reaches a goal."""
    return asyncio.run(grow(Oracle(settings(), start), start))


async def grow(oracle: Oracle, start: Path) -> list[list[Tree]]:
    oracle.engine = TorchEngine(max_context=oracle.max_context, features=0, deterministic=True)
    draws, found = random.Random(5), []
    for step in range(2):
        await oracle.engine.load_weights(Version(0, step), start)
        grown = [await oracle.grow(TREES * step + number, step) for number in range(TREES)]
        found.append([drawn(tree, draws) for tree in grown])
    await oracle.engine.close()
    return found


def drawn(tree: Tree, draws: random.Random) -> Tree:
    leaves = [msgspec.structs.replace(c, outcome=outcome(c.outcome, draws)) for c in tree.continuations]
    return msgspec.structs.replace(tree, continuations=leaves)


def outcome(found: Outcome | None, draws: random.Random) -> Outcome:
    assert found is not None
    drawn = float(draws.random() < 0.5)
    return msgspec.structs.replace(found, reward=drawn, raw_reward=drawn)


CREDITS, WEIGHTS, PARTS = ("granted", "grpo"), ("none", "tis", "decoupled"), ((1, 1), (2, 4), (1, 8))


@pytest.mark.parametrize("credit, weight, parts", list(itertools.product(CREDITS, WEIGHTS, PARTS)))
def test_two_updates_of_the_learner_equal_the_plain_ones_bit_for_bit(
    credit: str, weight: str, parts: tuple[int, int], start: Path, batches: list[list[Tree]]
) -> None:
    loss = LossConfig(epochs=parts[0], minibatches=parts[1])
    config = settings(credit=CreditConfig(name=credit), weight=WeightConfig(name=weight, cap=1.2), loss=loss)
    oracle, model = Oracle(config, start), load_model(start)
    updater = Updater(alone(model, config.learner), config.learner, temperature=1.0, deterministic=True)
    for step, trees in enumerate(batches):
        oracle.update(trees, step)
        arrived = trees[::-1]  # the order of arrival leaves no trace
        report = updater.update(arrived, Clock(Version(0, step), max_lag=0))
        assert report.applied and report.metrics["grad_norm"] > 0
        for (name, ours), theirs in zip(model.named_parameters(), oracle.model.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} differs after update {step + 1}"
