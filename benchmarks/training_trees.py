"""Trees for `benchmarks.tree_training`: agents' turns behind a prompt, with as much shared as asked for.

    sharing s ─▶ 2 s branches of about `BRANCH` tokens ─▶ prompt, trunk, forks in its last third ─▶ Tree

The token ratio of such a tree is about s; what it is exactly is counted, not assumed. Tokens are random: no
kernel's time depends on their values.
"""

from __future__ import annotations

import numpy as np

from common.config_learner import CreditConfig, NodeWeight
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    ROOT,
    Continuation,
    Ending,
    Node,
    Outcome,
    RewardSource,
    TaskId,
    Tree,
    Turn,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)
from learner.credit import CREDITS, NO_EVIDENCE
from learner.rows import Clock, Row, RowCounts, build_rows

BRANCH = 640
"""Tokens of a branch: a prompt and some twenty short turns. Attention is then about the share of the work, at
the benchmark's width, that it is for a model of 4,096 at 7,000 tokens."""
PROMPT = 8
"""Tokens that all branches share at least."""
ACTION, OBSERVATION = 12, 20
"""Tokens of a turn; turns are half as long to half as long again."""
VOCABULARY = 1024
NOW = Version(lineage=0, step=0)


class _Growing:
    """A tree while it is made."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        prompt = Turn(observation=ids_to_bytes(rng.integers(3, VOCABULARY, PROMPT)))
        self.nodes = [Node(index=ROOT, parent=NO_PARENT, lease=NO_LEASE, offset=0, depth=0, turn=prompt)]
        self.continuations: list[Continuation] = []

    def continuation(self, anchor: int, tokens: int) -> list[int]:
        """Turns of `tokens` together, at least one, below an anchor; returns their nodes."""
        made: list[int] = []
        while tokens > 0 or not made:
            parent = made[-1] if made else anchor
            turn = self._turn(tokens)
            tokens -= (len(turn.action) + len(turn.observation)) // 4
            made.append(len(self.nodes))
            self.nodes.append(
                Node(
                    index=made[-1],
                    parent=parent,
                    lease=len(self.continuations),
                    offset=len(made) - 1,
                    depth=self.nodes[parent].depth + 1,
                    turn=turn,
                    value=float(self.rng.random()),
                )
            )
        self.continuations.append(self._ended(anchor, made))
        return made

    def _turn(self, left: int) -> Turn:
        action = max(1, min(int(ACTION * self.rng.uniform(0.5, 1.5)), left))
        observation = max(0, min(int(OBSERVATION * self.rng.uniform(0.5, 1.5)), left - action))
        logprobs = np.minimum(-np.log(VOCABULARY) + self.rng.normal(0, 0.2, action), -0.01)
        return Turn(
            action=ids_to_bytes(self.rng.integers(3, VOCABULARY, action)),
            observation=ids_to_bytes(self.rng.integers(3, VOCABULARY, observation)),
            logprobs=floats_to_bytes(logprobs),
            versions=[VersionRun(version=NOW, count=action)],
        )

    def _ended(self, anchor: int, made: list[int]) -> Continuation:
        reward = float(self.rng.random() < 0.5)
        outcome = Outcome(
            reward=reward, raw_reward=reward, source=RewardSource.ENVIRONMENT, ending=Ending.TERMINATED
        )
        return Continuation(
            number=len(self.continuations), anchor=anchor, nodes=made, weight=0.1, baseline=0.5,
            predictor_version=0, score_stamp=0, speculative=False, outcome=outcome, ended="finished",
        )  # fmt: skip


def branches_of(sharing: int) -> int:
    """Branches of a tree: enough that the trunk need not be all of each."""
    return max(4, 2 * sharing)


def training_tree(sharing: int, tree_id: int, seed: int) -> Tree:
    """A tree whose token ratio is about `sharing`; at 1 its branches share the prompt only."""
    growing = _Growing(np.random.default_rng([seed, tree_id, sharing]))
    rng, branches = growing.rng, branches_of(sharing)
    trunk = round(branches * BRANCH * (1 - 1 / sharing) / (branches - 1))
    own = BRANCH - trunk
    shared: list[int] = []
    if trunk:
        # The first continuation makes the trunk and goes on; the others fork in the trunk's last third.
        shared = growing.continuation(ROOT, trunk + own - PROMPT)
        before = np.cumsum([_tokens(growing.nodes[node]) for node in shared]) + PROMPT
        shared = [node for node, at in zip(shared, before.tolist(), strict=True) if at <= trunk]
    while len(growing.continuations) < branches:
        late = shared[len(shared) - -(-len(shared) // 3) :]
        anchor = int(rng.choice(late)) if late else ROOT
        growing.continuation(anchor, max(1, round(own * rng.uniform(0.5, 1.5))))
    return Tree(
        id=tree_id, task=TaskId(env="bench", split="train", index=tree_id), wave=0, nodes=growing.nodes,
        continuations=growing.continuations, planned_weight=1.0, opened_at=NOW,
    )  # fmt: skip


def _tokens(node: Node) -> int:
    return (len(node.turn.action) + len(node.turn.observation)) // 4


def training_rows(sharing: int, trees: int, seed: int = 0) -> list[Row]:
    """Rows of several trees, paid as by default."""
    rows: list[Row] = []
    for number in range(trees):
        tree = training_tree(sharing, number, seed)
        credits = CREDITS["granted"].function(tree, CreditConfig(), NO_EVIDENCE)
        rows += build_rows(tree, credits, NodeWeight.GRANTED, Clock(NOW, 0), RowCounts())
    return rows
