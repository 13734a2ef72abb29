"""Trees to rows: one training row for each branch, tokens as they were sampled.

    Tree ── credit ──▶ BranchCredit ── node weight, lag gate ──▶ Row  (+ RowCounts: every token counted)

A row is the walk from the root to a leaf: prompt, then action and observation tokens in turn. The action mask
comes from the spans in which tokens were made, never from their values. Tokens after the last trained one are
cut off: nothing is learnt there and causal attention looks back only.

Shapes: `[T]` one entry a token of the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.config_learner import NodeWeight
from common.nouns import ROOT, Node, Tree, Version, floats, ids
from common.staleness import INFINITELY_STALE, policy_lag
from learner.credit.base import BranchCredit, owners_of

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

NO_LAG = -1
"""Lag of a token that nobody sampled."""


@dataclass(frozen=True, slots=True)
class Clock:
    """What the age of a token is measured against."""

    current: Version
    """The weights about to be updated."""
    max_lag: int
    """K."""
    resumed: tuple[int, ...] = (0,)
    """Step at which each lineage resumed, by its number (`common.staleness.policy_lag`)."""

    def lag(self, sampled: Version) -> int:
        return policy_lag(self.current, sampled, self.resumed)


@dataclass(frozen=True, slots=True)
class Row:
    """One branch, ready for a forward pass."""

    tree: int
    continuation: int
    ids: Ints
    """`[T]`"""
    trained: Mask
    """`[T]`: sampled, young enough, and this branch's to train."""
    behaviour: Floats
    """`[T]` log-probabilities at sampling; 0 where not sampled."""
    advantages: Floats
    """`[T]`; 0 where not sampled."""
    weights: Floats
    """`[T]`; 0 where this branch does not train the token."""
    lags: Ints
    """`[T]` updates since the token was sampled; `NO_LAG` where not sampled."""
    nodes: Ints
    """`[T]` node of the tree that each token belongs to: equal numbers stand together and are one turn. What
    two rows of a tree hold of the same node is the same, from its first token on."""

    @property
    def length(self) -> int:
        return len(self.ids)

    def has_gradient(self) -> bool:
        """Whether any coefficient advantage × weight of a trained token differs from exactly zero."""
        return bool(np.any(self.trained & (self.advantages != 0) & (self.weights != 0)))


@dataclass(slots=True)
class RowCounts:
    """Where the tokens and branches of a batch went. A token is counted once, whatever shares it."""

    branches: int = 0
    """With an outcome."""
    tokens_generated: int = 0
    """All action tokens: trained + without contrast + stale + without credit + demonstrated."""
    tokens_trained: int = 0
    """Trained by at least one branch that has a gradient: these went through a forward and backward pass."""
    tokens_without_contrast: int = 0
    """Young enough, but all branches that train them are paid exactly zero, and skipped."""
    tokens_stale: int = 0
    """Sampled by weights older than K: context without gradient."""
    tokens_without_credit: int = 0
    """Young enough, but no branch trains them (their continuation ended without an outcome)."""
    tokens_demonstrated: int = 0
    """Of demonstrations: no weights sampled them, so that they are context whatever K is."""
    stale_branches: int = 0
    """With tokens to train, all of which are older than K; they stay in every denominator. Short by
    construction: the longer a branch took, the likelier it is that newer weights sampled its end. A branch
    that has none to train at any K (it sampled nothing, weighs 0, is all demonstration) is not among them."""
    stale_branch_tokens: int = 0
    stale_branch_reward: float = 0.0
    """Sum of raw rewards of the stale branches."""

    @property
    def tokens_context(self) -> int:
        """Action tokens that could not be trained, whatever they would have been paid."""
        return self.tokens_stale + self.tokens_without_credit + self.tokens_demonstrated


@dataclass(frozen=True, slots=True)
class _Span:
    """One node's tokens: `[a]` action tokens, then `[o]` observation tokens."""

    ids: Ints
    num_actions: int
    behaviour: Floats
    lags: Ints
    sampled: bool
    """By weights: false for a demonstration."""

    def stale(self, max_lag: int) -> int:
        """How many of its tokens were sampled by weights that are too old."""
        return int((self.lags > max_lag).sum()) if self.sampled else 0


def build_rows(
    tree: Tree, credits: Sequence[BranchCredit], node_weight: NodeWeight, clock: Clock, counts: RowCounts,
    trains_unpaid: bool = False,
) -> list[Row]:  # fmt: skip
    """Rows of a tree's branches in the tree's order; those with nothing to train are left out, and
    counted where age is the reason.

    Args:
        tree: as finished.
        credits: of its branches.
        node_weight: what a token that several branches share is worth in each of them.
        clock: ages tokens; older than K is context.
        counts: added to in place.
        trains_unpaid: whether branches that are paid exactly zero are trained all the same (a KL term, say).
    """
    spans = [_span(node, clock) for node in tree.nodes]
    sharing = _branches_below(tree, credits)
    rows: list[Row] = []
    trained, uncontrasted = set[int](), set[int]()
    for credit in credits:
        shares = _shares(tree, credit, node_weight, sharing)
        row = _row(tree, credit, shares, spans, clock.max_lag)
        nodes = trained if trains_unpaid or row.has_gradient() else uncontrasted
        nodes.update(node.index for node, share in zip(credit.turns, shares, strict=True) if share)
        if row.trained.any():
            rows.append(row)
        elif any(
            share and spans[node.index].stale(clock.max_lag)
            for node, share in zip(credit.turns, shares, strict=True)
        ):
            _count_stale_branch(credit, counts)
    counts.branches += len(credits)
    _count_tokens(spans, trained, uncontrasted, clock.max_lag, counts)
    return rows


def _span(node: Node, clock: Clock) -> _Span:
    turn = node.turn
    count = turn.num_action_tokens
    sampled = len(turn.logprobs) > 0
    lags = [clock.lag(run.version) for run in turn.versions for _ in range(run.count)] if sampled else []
    return _Span(
        ids=np.concatenate([ids(turn.action), ids(turn.observation)]).astype(np.int64),
        num_actions=count,
        # No weights sampled a demonstration, whatever versions it names: it is context, and never trained.
        behaviour=floats(turn.logprobs).astype(np.float32) if sampled else np.zeros(count, np.float32),
        lags=np.asarray(lags if lags else [INFINITELY_STALE] * count, np.int64),
        sampled=sampled,
    )


def _branches_below(tree: Tree, credits: Iterable[BranchCredit]) -> list[int]:
    """How many branches pass through each node, `[nodes]`."""
    below = [0] * len(tree.nodes)
    for credit in credits:
        for node in credit.turns:
            below[node.index] += 1
    return below


def _shares(tree: Tree, credit: BranchCredit, node_weight: NodeWeight, sharing: list[int]) -> list[float]:
    """What each turn of a branch is worth in this branch, `[turns]`; 0 = context."""
    if node_weight is NodeWeight.LEAF_SHARE:
        return [credit.weight] * len(credit.turns)
    if node_weight is NodeWeight.ONCE:
        return [credit.weight / sharing[node.index] for node in credit.turns]
    owners = owners_of(tree, credit.continuation)
    return [credit.weight if node.lease in owners else 0.0 for node in credit.turns]


def _row(
    tree: Tree, credit: BranchCredit, shares: Sequence[float], spans: Sequence[_Span], max_lag: int
) -> Row:
    root = spans[ROOT]
    lengths = [len(root.ids)] + [len(spans[node.index].ids) for node in credit.turns]
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    tokens = np.concatenate([root.ids, *(spans[node.index].ids for node in credit.turns)])
    trained = np.zeros(total, np.bool_)
    behaviour, advantages, weights = (np.zeros(total, np.float32) for _ in range(3))
    lags = np.full(total, NO_LAG, np.int64)
    nodes = np.repeat([ROOT, *(node.index for node in credit.turns)], lengths).astype(np.int64)
    turns = zip(starts[1:], credit.turns, credit.advantages, shares, strict=False)
    for start, node, advantage, share in turns:
        span = spans[node.index]
        actions = slice(int(start), int(start) + span.num_actions)
        behaviour[actions], lags[actions] = span.behaviour, span.lags
        advantages[actions], weights[actions] = advantage, share
        trained[actions] = (span.lags <= max_lag) & (share != 0)
    end = int(np.flatnonzero(trained)[-1]) + 1 if trained.any() else 0
    return Row(
        tree.id, credit.continuation.number,
        tokens[:end], trained[:end], behaviour[:end], advantages[:end], weights[:end], lags[:end],
        nodes[:end],
    )  # fmt: skip


def _count_stale_branch(credit: BranchCredit, counts: RowCounts) -> None:
    outcome = credit.continuation.outcome
    counts.stale_branches += 1
    counts.stale_branch_tokens += sum(node.turn.num_action_tokens for node in credit.turns)
    counts.stale_branch_reward += outcome.raw_reward if outcome is not None else 0.0


def _count_tokens(
    spans: Sequence[_Span], trained: set[int], uncontrasted: set[int], max_lag: int, counts: RowCounts
) -> None:
    """Each node's tokens, once; `trained` goes before `uncontrasted` where branches share a node."""
    for index, span in enumerate(spans):
        counts.tokens_generated += span.num_actions
        if not span.sampled:
            counts.tokens_demonstrated += span.num_actions
            continue
        stale = span.stale(max_lag)
        fresh = span.num_actions - stale
        counts.tokens_stale += stale
        if index in trained:
            counts.tokens_trained += fresh
        elif index in uncontrasted:
            counts.tokens_without_contrast += fresh
        else:
            counts.tokens_without_credit += fresh
