"""Prompts whose chance of success moves as a martingale along the prefix, and the targets that trees over
them give: the shared predictor is measured on prompts it never saw, against chances that are known exactly.

X is a random walk of T steps, success is X_T > 0, hence V(prefix of depth t) = Φ(X_t / √(T − t)). An engine
would see X in its hidden states: here through a fixed projection, with noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from common.predictor import Predictor, Target
from common.prefix import Prefix, Tally

TURNS = 6
WIDTH = 6
PROJECTION = np.random.default_rng(99).normal(0.0, 1.0, WIDTH)


def chance(x: float, depth: int) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0 * (TURNS - depth)))


@dataclass
class Node:
    x: float
    depth: int
    parent: Node | None
    features: bytes | None
    at: Tally = field(default_factory=Tally)


@dataclass
class Term:
    """A target before anything was predicted for it, and the true chance of its prefix."""

    prefix: Prefix
    outcome: float
    share: float
    beside: Tally
    truth: float


class Prompts:
    """Trees over fresh prompts: `roots` continuations at once, then `more` one by one from random turns."""

    def __init__(
        self, seed: int, roots: int = 2, more: int = 3, sight: float = 0.4, missing: float = 0.2
    ) -> None:
        self.draws = np.random.default_rng(seed)
        self.roots, self.more, self.sight, self.missing = roots, more, sight, missing

    def wave(self, trees: int = 20, level: float = 0.0) -> list[Term]:
        """The terms of a wave; `level` shifts how easy its prompts are."""
        return [term for _ in range(trees) for term in self._tree(level)]

    def _node(self, x: float, parent: Node | None) -> Node:
        seen = self.draws.random() >= self.missing
        view = PROJECTION * x * self.sight + self.draws.normal(0.0, 1.0, WIDTH)
        depth = 0 if parent is None else parent.depth + 1
        return Node(x, depth, parent, view.astype("<f4").tobytes() if seen else None)

    def _tree(self, level: float) -> list[Term]:
        root = self._node(level + self.draws.normal(0.0, 1.5), None)
        opened, terms = [root], []
        for anchors in [[root] * self.roots] + [[None]] * self.more:
            starts = [opened[int(self.draws.integers(len(opened)))] if a is None else a for a in anchors]
            terms += self._decision(root, starts, opened)
        return terms

    def _decision(self, root: Node, starts: list[Node], opened: list[Node]) -> list[Term]:
        """Continuations granted together: none of them knows how the others end."""
        tree, terms, ended, beside = root.at, [], [], Tally()
        for anchor in starts:
            path = [anchor]
            while path[-1].depth < TURNS:
                path.append(self._node(path[-1].x + self.draws.normal(), path[-1]))
            outcome = float(path.pop().x > 0)
            share = 1.0 / len(path)
            terms.append(self._term(anchor, tree, anchor.at, outcome, share, beside))
            terms += [self._term(node, tree, Tally(), outcome, share, Tally()) for node in path[1:]]
            opened += path[1:]
            ended.append((path[-1], outcome))
            beside = beside.plus(outcome)
        for tip, outcome in ended:
            node: Node | None = tip
            while node is not None:
                node.at, node = node.at.plus(outcome), node.parent
        return terms

    def _term(self, node: Node, tree: Tally, at: Tally, outcome: float, share: float, beside: Tally) -> Term:
        prefix = Prefix(node.depth, features=node.features, tokens=2 * (node.depth > 0), tree=tree, below=at)
        return Term(prefix, outcome, share, beside, chance(node.x, node.depth))


def learn(
    predictor: Predictor, terms: list[Term], version: int | None = None
) -> list[tuple[Term, float, float]]:
    """Predict each term (under `version`), then learn from all; returns (term, mean, std)."""
    told = [(term, predictor.predict(term.prefix, version)) for term in terms]
    predictor.update([Target(t.prefix, p.mean, t.outcome, t.share, t.beside) for t, p in told])
    return [(term, prediction.mean, prediction.std) for term, prediction in told]
