"""Micro-batches written by hand, for what reads no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.batching import MicroBatch


def micro_batch(
    behaviour: Sequence[float],
    lags: Sequence[int],
    positive: Sequence[float] | None = None,
    negative: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> MicroBatch:
    """One branch that trains each of N tokens; log μ, lags and coefficients are the caller's."""
    count = len(behaviour)
    places, nothing = torch.arange(count), [0.0] * count
    up, down = torch.tensor(positive or nothing), torch.tensor(negative or nothing)
    worth = torch.tensor(weights or [1.0] * count)
    return MicroBatch(
        ids_BT=torch.zeros(1, count, dtype=torch.int64),
        positions_BT=places[None],
        ends_BT=None,
        lines_N=torch.zeros_like(places),
        sources_N=places,
        targets_N=torch.zeros_like(places),
        behaviour_N=torch.tensor(behaviour),
        lags_N=torch.tensor(lags),
        keys_N=places,
        positive_N=up,
        negative_N=down,
        weights_N=worth,
        pair_tokens_M=places,
        pair_branches_M=torch.zeros_like(places),
        pair_turns_M=torch.zeros_like(places),
        pair_advantages_M=(up - down) / worth,
        pair_weights_M=worth,
        branches=(0,),
    )
