"""How likely a few more continuations are to bring the outcome that a tree lacks: a small learned model.

    uniform tree ─▶ features ─▶ P(rescue) ─▶ attempted? ─▶ was the other outcome found? ─▶ learn

Logistic regression on features of the tree as it stands, trained with the cross-entropy of the observed
"rescued" bit, after InfoTree's allocator (arXiv 2605.05262), of which the abstract is known: the features and
the form are a reconstruction. Each weight has a normal prior of mean 0 and deviation 1, features are of order
1, and the fit is the maximum of the posterior over the newest attempts (Newton's method; they are few), hence
a function of those attempts alone.

Only attempts teach, and attempts go where a rescue looks likely. Scores therefore are optimistic: log-odds
plus one standard deviation of the posterior. At first that makes all trees look hopeful, well above what
rescues usually are; then each kind of tree until it was tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allocator.rules.base import BranchView, TreeView
from common.nouns import NO_PARENT, ROOT, RewardSource, floats

FEATURES = (
    "bias", "success", "continuations", "from_root", "depth", "entropy", "value_before", "value", "value_std",
    "flip_mean", "flip_most",
)  # fmt: skip
KEPT = 512
"""Newest attempts that the model is fitted to: the policy changes, and old ones mislead."""
STEPS = 50
"""Of Newton's method, most; with the prior it needs about five."""
EXACT = 1e-10

Row = tuple[float, ...]
"""Features of a tree, as named by `FEATURES`."""


def outcomes(view: TreeView) -> list[float]:
    """What the environment paid on the paths that have ended; guesses and prunings are no outcomes."""
    return [
        round(_earned_before(view, branch) + branch.outcome.raw_reward, 9)  # without the last bits of a sum
        for branch in view.branches.values()
        if branch.outcome is not None and branch.outcome.source is RewardSource.ENVIRONMENT
    ]


def _earned_before(view: TreeView, branch: BranchView) -> float:
    """Rewards of the turns from the prompt to a branch's anchor."""
    node = view.node(branch.anchor)
    total = node.turn.reward
    while node.parent != NO_PARENT:
        node = view.node(node.parent)
        total += node.turn.reward
    return total


def mixed(view: TreeView) -> bool:
    """Whether a tree holds outcomes that differ."""
    return len(set(outcomes(view))) > 1


def describe_uniform(view: TreeView) -> Row | None:
    """Features of a tree whose outcomes are all alike; None for one that is mixed or has none."""
    found = outcomes(view)
    if not found or len(set(found)) > 1:
        return None
    success = min(1.0, max(0.0, found[0]))
    branches = list(view.branches.values())
    leaves = [view.node(branch.nodes[-1]).depth for branch in branches if branch.nodes]
    flips = [_flip(view, anchor, success) for anchor in view.anchors()]
    root, before = view.predict(ROOT), view.node(ROOT).value
    return (
        1.0,
        success,
        math.log2(1 + len(found)) / 4,
        sum(branch.anchor == ROOT for branch in branches) / len(branches),
        math.log2(1 + _mean(leaves)) / 4,
        min(1.0, _entropy(view) / 3),
        root.mean if before is None else before,
        root.mean,
        2 * root.std,
        _mean(flips),
        max(flips),
    )


def _flip(view: TreeView, anchor: int, success: float) -> float:
    """Chance that a fresh continuation from there ends otherwise."""
    value = view.predict(anchor).mean
    return success * (1 - value) + (1 - success) * value


def _entropy(view: TreeView) -> float:
    """Mean over the turns of the mean entropy of their tokens, in nats; 0 where the engine tells none."""
    turns = [view.node(index).turn for branch in view.branches.values() for index in branch.nodes]
    means = [_mean(floats(turn.entropies).tolist()) for turn in turns if turn.entropies]
    return _mean(means)


def _mean(values: Sequence[float]) -> float:
    """Exactly rounded, whatever the order."""
    return math.fsum(values) / len(values) if values else 0.0


class RescueModel:
    """P(rescue) by features, with its uncertainty."""

    def __init__(self) -> None:
        self.loss: float | None = None
        """Mean cross-entropy of the newest attempts under the model that chose them, nats."""
        self._rows: list[Row] = []
        self._rescued: list[bool] = []
        self._fit()

    def chance(self, row: Row) -> float:
        """Probability of a rescue, as the attempts so far tell it."""
        return float(_sigmoid(np.dot(row, self._weights)))

    def score(self, row: Row) -> float:
        """The same, optimistically: what attempts are chosen by."""
        features = np.array(row)
        deviation = math.sqrt(float(features @ self._covariance @ features))
        return float(_sigmoid(features @ self._weights + deviation))

    def learn(self, rows: Sequence[Row], rescued: Sequence[bool]) -> None:
        """Take in attempts, in the order given, and fit anew."""
        if not rows:
            return
        logits = np.array(rows) @ self._weights
        losses = np.logaddexp(0.0, logits) - np.array(rescued) * logits
        self.loss = _mean(losses.tolist())
        self._rows = [*self._rows, *rows][-KEPT:]
        self._rescued = [*self._rescued, *rescued][-KEPT:]
        self._fit()

    def _fit(self) -> None:
        """Newton's method from 0; a step that does not help is halved."""
        x = np.array(self._rows).reshape(-1, len(FEATURES))
        y = np.array(self._rescued, dtype=float)
        weights = np.zeros(len(FEATURES))
        for _ in range(STEPS):
            p = _sigmoid(x @ weights)
            gradient = x.T @ (p - y) + weights
            step = np.linalg.solve(_hessian(x, p), gradient)
            if float(np.abs(step).max()) < EXACT:
                break
            here, length = _objective(x, y, weights), 1.0
            while _objective(x, y, weights - length * step) > here and length > EXACT:
                length /= 2
            weights = weights - length * step
        self._weights = weights
        self._covariance = np.linalg.inv(_hessian(x, _sigmoid(x @ weights)))

    def to_state(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "rows": [list(row) for row in self._rows],
            "rescued": list(self._rescued),
            "weights": self._weights.tolist(),
            "covariance": self._covariance.tolist(),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]
        self._rows = [tuple(row) for row in state["rows"]]
        self._rescued = list(state["rescued"])
        self._weights = np.array(state["weights"])
        self._covariance = np.array(state["covariance"])


Vector = NDArray[np.float64]


def _sigmoid(z: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-np.clip(z, -500, 500)))


def _hessian(x: Vector, p: Vector) -> Vector:
    """Of the negative log-posterior."""
    hessian: Vector = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(FEATURES))
    return hessian


def _objective(x: Vector, y: Vector, weights: Vector) -> float:
    """Negative log-posterior, up to a constant."""
    z = x @ weights
    return float(np.sum(np.logaddexp(0.0, z) - y * z) + weights @ weights / 2)
