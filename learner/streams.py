"""The streams of a micro-batch that losses, weights and diagnostics read.

A token that several branches train stands once. What each branch pays for it are *pairs* of a token and a
branch. A clipped loss is linear in the advantage on either side of zero, but not across it, so that the sums
of positive and of negative coefficients, apart, give the loss of branch-by-branch training exactly; terms
without an advantage (KL, entropy) need the summed weight; sequence losses need the pairs themselves.

Shapes: N trained tokens, each once; M ≥ N pairs; B branches. Branch by branch M = N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Streams(NamedTuple):
    """Tokens of a micro-batch in any order. Masked entries may hold anything, NaN included."""

    logprobs: Tensor
    """`[N]` log π_θ, with gradient."""
    old: Tensor
    """`[N]` log π_old of the same tokens: the behaviour policy's, or the proximal one's."""
    behaviour: Tensor
    """`[N]` log μ, as sampled."""
    mask: Tensor
    """`[N]` bool: tokens that count."""
    positive: Tensor
    """`[N]` Σ over the token's pairs of weight · max(A, 0)."""
    negative: Tensor
    """`[N]` Σ over the token's pairs of weight · max(−A, 0)."""
    weights: Tensor
    """`[N]` Σ over the token's pairs of weight."""
    pair_tokens: Tensor
    """`[M]` the token of each pair: 0 to N − 1."""
    pair_branches: Tensor
    """`[M]` its branch: 0 to B − 1."""
    pair_turns: Tensor
    """`[M]` its turn: 0 to the number of (branch, turn) segments − 1; equal numbers are one turn of one
    branch. For losses with one ratio a turn; none of those in `learner.loss` today reads it."""
    pair_advantages: Tensor
    """`[M]`"""
    pair_weights: Tensor
    """`[M]`"""
    branches: int
    """B."""

    @classmethod
    def of_rows(
        cls,
        logprobs: Tensor,
        old: Tensor,
        behaviour: Tensor,
        advantages: Tensor,
        weights: Tensor,
        branches: Tensor,
        turns: Tensor,
        mask: Tensor | None = None,
    ) -> Streams:
        """Streams in which each token has exactly one branch, `[N]` each."""
        return cls(
            logprobs=logprobs,
            old=old,
            behaviour=behaviour,
            mask=torch.ones_like(logprobs, dtype=torch.bool) if mask is None else mask,
            positive=weights * advantages.clamp(min=0),
            negative=weights * (-advantages).clamp(min=0),
            weights=weights,
            pair_tokens=torch.arange(len(logprobs)),
            pair_branches=branches,
            pair_turns=turns,
            pair_advantages=advantages,
            pair_weights=weights,
            branches=int(branches.max()) + 1 if len(branches) else 0,
        )

    def per_token(self, pair_values: Tensor) -> Tensor:
        """Sum over each token's pairs, `[M]` to `[N]`."""
        return torch.zeros_like(self.logprobs).index_add(0, self.pair_tokens, pair_values)
