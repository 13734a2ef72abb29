"""What a credit estimator takes and gives.

A *branch* is the walk from the root to the leaf of one continuation that ended with an outcome. Its turns are
the nodes of that walk without the root, those of other continuations above its anchor included: which of them
the branch trains, and with what share of its weight, is `learner.node_weight`'s choice (`learner.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.config_learner import CreditConfig
from common.nouns import NO_PARENT, ROOT, Continuation, Node, Tree


@dataclass(frozen=True, slots=True)
class BranchCredit:
    """What one branch is paid."""

    continuation: Continuation
    """The one whose outcome this is; never one without an outcome."""
    turns: tuple[Node, ...]
    """The branch without the root, `[turns]`."""
    advantages: tuple[float, ...]
    """Advantage of each turn, `[turns]`; all tokens of a turn share it."""
    weight: float
    """What the branch is worth in its prompt; the update divides by nothing but the number of prompts. A
    realised count is in it where the method says so: none under `granted`, the leaves under `grpo`."""


Credit = Callable[[Tree, CreditConfig], list[BranchCredit]]
"""One entry for each continuation with an outcome, in the tree's order. Pure, and divides by no realised
count unless its paper does."""


def leaf_of(continuation: Continuation) -> int:
    """Index of the node a continuation ended at: its last one, or its anchor if it sampled none."""
    return continuation.nodes[-1] if continuation.nodes else continuation.anchor


def branch_turns(tree: Tree, continuation: Continuation) -> tuple[Node, ...]:
    """The turns of a continuation's branch, `[turns]`, root left out."""
    return tuple(node for node in tree.walk(leaf_of(continuation)) if node.index != ROOT)


def returns_by_owner(turns: Sequence[Node], continuation: Continuation) -> dict[int, float]:
    """What a branch returns to each continuation whose turns it passes through, by number, leaf upwards.

    A continuation is paid from its own first turn on: what its turns on this branch earned, and what came
    after them. For the continuation that the branch belongs to that is its outcome, which holds all its own
    turns already. For a lease that ended at a horizon it is what its turns earned on the way and what this
    heir brought: with the heirs' shares 1/m as weights the sum over their branches is the lease's return, its
    own rewards and the weighted return of its heirs.

    Args:
        turns: of the branch, `[turns]` (`branch_turns`).
        continuation: its own, with an outcome.
    """
    if continuation.outcome is None:
        raise ValueError(f"continuation {continuation.number} has no outcome, hence no return")
    total = continuation.outcome.reward
    returns = {continuation.number: total}
    for node in reversed(turns):
        if node.lease != continuation.number:
            total += node.turn.reward
            returns[node.lease] = total
    return returns


def branch_reward(turns: Sequence[Node], continuation: Continuation) -> float:
    """What a branch earned from the prompt to its leaf."""
    return list(returns_by_owner(turns, continuation).values())[-1]


def turn_baselines(tree: Tree) -> dict[int, float]:
    """The baseline of each turn, by node index: what was predicted before the turn was sampled.

    The first turn of a continuation has the one fixed at its grant, a later turn the value of the node before
    it. Where nothing was predicted nothing is subtracted, which leaves the gradient unbiased.
    """
    at_grant = {continuation.number: continuation.baseline for continuation in tree.continuations}
    baselines = {}
    for node in tree.nodes:
        if node.parent == NO_PARENT:
            continue
        predicted = at_grant.get(node.lease) if node.offset == 0 else tree.nodes[node.parent].value
        baselines[node.index] = 0.0 if predicted is None else predicted
    return baselines
