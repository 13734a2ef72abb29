"""Synthetic trees, small models and settings for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.config import ModelConfig
from common.config_learner import CreditConfig, LearnerConfig, LossConfig, OptimizerConfig, WeightConfig
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    Continuation,
    Ending,
    Node,
    Outcome,
    RewardSource,
    TaskId,
    Tree,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)
from common.tokenizer import WordTokenizer

WORDS = tuple(f"w{number}" for number in range(21))
TOKENIZER = WordTokenizer.build(WORDS)
"""24 ids: three special ones and the words."""
SMALL_MODEL = ModelConfig(hidden_size=16, layers=2, heads=2, intermediate_size=32, max_context=128)
V0 = Version(lineage=0, step=0)


def outcome(reward: float) -> Outcome:
    return Outcome(
        reward=reward, raw_reward=reward, source=RewardSource.ENVIRONMENT, ending=Ending.TERMINATED
    )


def turn(
    action: Sequence[int] = (),
    observation: Sequence[int] = (),
    logprobs: Sequence[float] | None = None,
    versions: Sequence[tuple[Version, int]] | None = None,
) -> Turn:
    if versions is None:
        versions = [(V0, len(action))] if action else []
    return Turn(
        action=ids_to_bytes(action),
        observation=ids_to_bytes(observation),
        logprobs=floats_to_bytes(logprobs if logprobs is not None else [-1.0] * len(action)),
        versions=[VersionRun(version=version, count=count) for version, count in versions],
        status=TurnStatus.OPEN,
    )


def node(
    index: int,
    parent: int,
    lease: int,
    offset: int,
    made: Turn,
    *,
    depth: int = 1,
    value: float | None = None,
) -> Node:
    return Node(index=index, parent=parent, lease=lease, offset=offset, depth=depth, turn=made, value=value)


def continuation(
    number: int,
    nodes: Sequence[int],
    reward: float | None,
    *,
    anchor: int = 0,
    weight: float = 0.5,
    baseline: float | None = None,
    heir_of: int = -1,
) -> Continuation:
    return Continuation(
        number=number, anchor=anchor, nodes=list(nodes), weight=weight, baseline=baseline,
        predictor_version=0, score_stamp=0, speculative=False, heir_of=heir_of,
        outcome=None if reward is None else outcome(reward),
        ended="finished" if reward is not None else "dropped",
    )  # fmt: skip


def make_tree(
    nodes: Sequence[Node],
    continuations: Sequence[Continuation],
    tree_id: int = 0,
    prompt: Sequence[int] = (3, 4, 5),
) -> Tree:
    root = node(0, NO_PARENT, NO_LEASE, 0, turn(observation=prompt), depth=0)
    return Tree(
        id=tree_id, task=TaskId(env="test", split="train", index=tree_id), wave=0, nodes=[root, *nodes],
        continuations=list(continuations), planned_weight=1.0, opened_at=V0,
    )  # fmt: skip


def forked_tree(tree_id: int = 0) -> Tree:
    """Continuation 0 samples nodes 1, 2; continuation 1 starts from node 1 and samples node 3.

    root ── 1 ── 2 (reward 1)
            └─── 3 (reward 0)
    """
    return make_tree(
        [
            node(1, 0, 0, 0, turn((6, 7), (8,), (-0.1, -0.2)), value=0.25),
            node(2, 1, 0, 1, turn((9,), (10, 11), (-0.3,)), depth=2),
            node(3, 1, 1, 0, turn((12, 13), (14,), (-0.4, -0.5)), depth=2),
        ],
        [
            continuation(0, [1, 2], 1.0, weight=0.5, baseline=0.125),
            continuation(1, [3], 0.0, anchor=1, weight=0.25, baseline=0.5),
        ],
        tree_id,
    )


def flat_tree(
    tree_id: int,
    rng: np.random.Generator,
    *,
    branches: int = 4,
    max_turns: int = 3,
    version: Version = V0,
    rewards: Sequence[float] | None = None,
) -> Tree:
    """Independent branches from the root, random in length, tokens and reward."""
    nodes, continuations = [], []
    for number in range(branches):
        parent, own = 0, []
        for offset in range(int(rng.integers(1, max_turns + 1))):
            size = int(rng.integers(1, 4))
            made = turn(
                rng.integers(3, 24, size).tolist(),
                rng.integers(3, 24, int(rng.integers(0, 4))).tolist(),
                (-rng.random(size) * 4 - 0.5).tolist(),
                [(version, size)],
            )
            index = len(nodes) + 1
            nodes.append(node(index, parent, number, offset, made, depth=offset + 1, value=0.25))
            own.append(index)
            parent = index
        reward = float(rng.random() < 0.5) if rewards is None else rewards[number]
        continuations.append(continuation(number, own, reward, weight=1 / branches, baseline=0.5))
    return make_tree(nodes, continuations, tree_id, rng.integers(3, 24, int(rng.integers(2, 6))).tolist())


def flat_trees(count: int, seed: int = 0, **shape: int) -> list[Tree]:
    """Trees 0, 1, … of `flat_tree`, drawn one after the other; `shape` goes to each."""
    rng = np.random.default_rng(seed)
    return [flat_tree(number, rng, **shape) for number in range(count)]  # type: ignore[arg-type]


def learner_config(**changes: object) -> LearnerConfig:
    """Small and quick, learning rate 0.01 from the first step."""
    settings: dict[str, object] = dict(
        steps=3, batch_trees=4, max_policy_lag=1, micro_batch_tokens=256, checkpoint_every=2,
        credit=CreditConfig(), loss=LossConfig(minibatches=1), weight=WeightConfig(),
        optimizer=OptimizerConfig(lr=0.01, warmup_steps=0),
    )  # fmt: skip
    settings.update(changes)
    return LearnerConfig(**settings)  # type: ignore[arg-type]
