"""Forward passes without gradient, before the first step of a batch: what tokens are worth to fixed weights.

    rows ─ micro-batches ─▶ log π of every token ─▶ KnownTokens (by key)          ─▶ the proximal policy
                                                └─▶ Σ log π − log μ of each turn  ─▶ Evidence ─▶ credit

Tokens are known by their key, whatever micro-batch they stand in: a prefix that two groups of a tree share is
computed in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.config_learner import NodeWeight
from common.nouns import Tree, Version
from common.staleness import INFINITELY_STALE
from learner.batching import MicroBatch
from learner.credit.base import BranchCredit, branch_turns
from learner.packing import node_of_key, tree_of_key
from learner.rows import Clock, Row, RowCounts, build_rows

Logprobs = Callable[[MicroBatch], Tensor]
"""log π of a micro-batch's tokens, `[N]`."""


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """A number for each of many tokens."""

    keys: Tensor
    """`[n]` ascending."""
    values: Tensor
    """`[n]`"""

    @classmethod
    def of(cls, keys: Sequence[Tensor], values: Sequence[Tensor]) -> KnownTokens:
        """Of a token that was computed more than once the first counts."""
        every = torch.cat([torch.empty(0, dtype=torch.int64), *keys])
        found, first = np.unique(every.numpy(), return_index=True)
        return cls(torch.from_numpy(found), torch.cat([torch.empty(0), *values])[torch.from_numpy(first)])

    def at(self, keys: Tensor) -> Tensor:
        """Their numbers, `[N]`. Raises `KeyError` for a token that was not computed."""
        places = torch.searchsorted(self.keys, keys).clamp(max=max(0, len(self.keys) - 1))
        if len(keys) and (not len(self.keys) or not torch.equal(self.keys[places], keys)):
            raise KeyError("a token of the batch was not in the pass before it")
        return self.values[places]


def known_tokens(batches: Iterable[MicroBatch], ask: Logprobs) -> KnownTokens:
    """One pass over micro-batches, without gradient: what `ask` says of each token, usually its log π."""
    keys, values = list[Tensor](), list[Tensor]()
    with torch.no_grad():
        for batch in batches:
            keys.append(batch.keys_N.cpu())
            values.append(ask(batch).float().cpu())
    return KnownTokens.of(keys, values)


def every_sampled_token(trees: Iterable[Tree], current: Version) -> list[Row]:
    """Rows of all branches in which every sampled token is trained, however old: for passes that ask about
    each of them, and for no update.

    Tokens of demonstrations are among them: rows must reach to the end of every prefix that a value head is
    asked about. What a pass makes of them is not read (`credit.base.Evidence.log_ratio`), nor logged.
    """
    rows: list[Row] = []
    clock = Clock(current, INFINITELY_STALE, (0,) * (current.lineage + 1))
    for tree in trees:
        credits = []
        for continuation in tree.leaves():
            turns = branch_turns(tree, continuation)
            credits.append(BranchCredit(continuation, turns, (1.0,) * len(turns), 1.0))
        rows += build_rows(tree, credits, NodeWeight.LEAF_SHARE, clock, RowCounts())
    return rows


def turn_log_ratios(batches: Iterable[MicroBatch], logprobs: Logprobs) -> dict[int, dict[int, float]]:
    """Σ over each turn's tokens of log π − log μ, by tree and node.

    Args:
        batches: of `every_sampled_token`.
        logprobs: of the current weights.
    """
    gaps = known_tokens(batches, lambda batch: logprobs(batch).float() - batch.behaviour_N)
    sums: dict[int, dict[int, float]] = {}
    for key, gap in zip(gaps.keys.tolist(), gaps.values.tolist(), strict=True):  # summed in double precision
        of_tree, node = sums.setdefault(tree_of_key(key), {}), node_of_key(key)
        of_tree[node] = of_tree.get(node, 0.0) + gap
    return sums
