"""What a credit estimator takes and gives.

    Tree, CreditConfig, Evidence ──function──▶ one BranchCredit for each continuation with an outcome

A *branch* is the walk from the root to the leaf of one continuation that ended with an outcome. Its turns are
the nodes of that walk without the root, those of other continuations above its anchor included: which of them
the branch trains, and with what share of its weight, is `learner.node_weight`'s choice (`learner.rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

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
    targets: tuple[float, ...] = ()
    """What a critic should have said of the prefix before each turn, `[turns]`; empty where the method has no
    critic."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the learner measured of a tree before it is credited. By node index, not by branch."""

    log_ratios: Mapping[int, float] = field(default_factory=dict)
    """Of each turn that was sampled: Σ over its tokens of log π_current − log μ."""
    values: Mapping[int, float] = field(default_factory=dict)
    """A value head's prediction at the end of each node's prefix, after its observation."""

    def log_ratio(self, node: Node) -> float:
        """Of a turn; 0 of one that no weights sampled (a demonstration).

        Raises:
            ValueError: it was not measured. Taken for 0 it would make stale data look fresh.
        """
        if not node.turn.logprobs:
            return 0.0
        if node.index not in self.log_ratios:
            raise ValueError(
                f"no log-ratio of node {node.index}: this credit needs one of every sampled turn"
            )
        return self.log_ratios[node.index]

    def value(self, index: int) -> float:
        """Of the prefix that ends with a node. Raises `ValueError` where the head said nothing."""
        if index not in self.values:
            raise ValueError(f"the value head said nothing about node {index}: it must see every prefix")
        return self.values[index]


NO_EVIDENCE = Evidence()

Credit = Callable[[Tree, CreditConfig, Evidence], list[BranchCredit]]
"""One entry for each continuation with an outcome, in the tree's order. Pure, and divides by no realised
count unless its paper does."""


@dataclass(frozen=True, slots=True)
class CreditMethod:
    """A credit and what it has to be given. Which losses and weights it goes with is
    `common.config_learner.CREDIT_DEMANDS`."""

    function: Credit
    needs_ratios: bool = False
    """Whether it reads `Evidence.log_ratios`."""
    has_critic: bool = False
    """Whether it has a critic, which `credit.critic` chooses."""

    def needs_values(self, settings: CreditConfig) -> bool:
        """Whether it reads `Evidence.values`, and a value head is to be trained on its targets."""
        return self.has_critic and settings.critic == "head"

    def __call__(
        self, tree: Tree, settings: CreditConfig, evidence: Evidence = NO_EVIDENCE
    ) -> list[BranchCredit]:
        return self.function(tree, settings, evidence)


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


def branch_reward(turns: Sequence[Node], continuation: Continuation, *, raw: bool = False) -> float:
    """What a branch earned from the prompt to its leaf; `raw` = by the environment's word, before shaping.

    Raises:
        ValueError: the continuation has no outcome, or its reward is no finite number: one NaN would make
            every mean and spread of its group NaN.
    """
    outcome = continuation.outcome
    if outcome is None:
        raise ValueError(f"continuation {continuation.number} has no outcome, hence no return")
    own = outcome.raw_reward if raw else outcome.reward
    if not isfinite(own):
        raise ValueError(f"continuation {continuation.number} has the reward {own}; expected a finite number")
    total = own
    for node in reversed(turns):
        if node.lease != continuation.number:
            total += node.turn.reward
    return total


def owners_of(tree: Tree, continuation: Continuation) -> frozenset[int]:
    """Numbers of the continuation and of the leases whose horizon it continues: its return is a share of
    theirs, and it trains their turns."""
    by_number = {other.number: other for other in tree.continuations}
    owners, current = {continuation.number}, continuation
    while current.heir_of in by_number and current.heir_of not in owners:
        current = by_number[current.heir_of]
        owners.add(current.number)
    return frozenset(owners)


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
