"""What a policy loss takes and gives, and arithmetic that the losses and weights share.

Every loss is a pure function on the streams of a micro-batch (`learner.streams`) and divides nothing: the
update divides once, by the number of prompts. Coefficients (advantage × branch weight) are inside it.

Shapes: N tokens, each once; M pairs of a token and a branch that trains it; B branches. Masked entries may
hold anything, NaN included: they are replaced before they are used, since 0 · NaN is NaN, forwards and
backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from common.config_learner import LossConfig
from learner.streams import Streams

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, as in verl: e^20 is far above any clip or cap, and finite."""


class TokenLoss(NamedTuple):
    """A loss for each token."""

    loss: Tensor
    """`[N]`, summed over the token's pairs, 0 where masked; a sum over tokens is meant, divided once and
    elsewhere."""
    clipped: Tensor
    """`[N]` bool: a bound changed the gradient of one of the token's pairs at least (took it, or, in `cispo`
    and `topr`, which keep it, cut its weight)."""


Loss = Callable[[Streams, LossConfig], TokenLoss]
"""(streams, settings); gradient flows through `streams.logprobs` only."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One method, and what it asks of the rest of the update."""

    function: Loss
    weights: frozenset[str]
    """Behaviour weights that may be chosen beside it (`common.config_learner.LOSS_WEIGHTS`)."""
    whole_branches: bool = False
    """It reads ratios of whole branches: all pairs of a branch must lie in one micro-batch."""
    trains_unpaid: bool = False
    """It has a term without advantage: tokens whose advantage is zero have a gradient too."""


def replace_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where `mask` is off: no NaN survives there, nor reaches a gradient."""
    return torch.where(mask, values, torch.zeros_like(values))


def ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """π / π_base of each token from their log-probabilities, `[N]`, finite for finite inputs."""
    return torch.exp(torch.clamp(logprobs - base_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def cleaned(streams: Streams) -> Streams:
    """The streams with 0 in every masked entry: ratios are 1 there and coefficients 0, hence losses 0.

    What is no function of π_θ is detached.
    """
    mask_N, mask_M = streams.mask, streams.mask[streams.pair_tokens]
    return streams._replace(
        logprobs=replace_masked(streams.logprobs, mask_N),
        old=replace_masked(streams.old.detach(), mask_N),
        behaviour=replace_masked(streams.behaviour.detach(), mask_N),
        positive=replace_masked(streams.positive, mask_N),
        negative=replace_masked(streams.negative, mask_N),
        weights=replace_masked(streams.weights, mask_N),
        pair_advantages=replace_masked(streams.pair_advantages, mask_M),
        pair_weights=replace_masked(streams.pair_weights, mask_M),
    )


def mean_log_ratio(streams: Streams, base: Tensor) -> Tensor:
    """log of the length-normalised ratio of each branch, (π_θ / π_base)^(1 / tokens), `[B]`, detached.

    The mean is over the branch's pairs, without masked ones: the tokens that this branch trains.

    Args:
        streams: cleaned ones.
        base: log π_base, `[N]`, 0 where masked.
    """
    at = streams.pair_tokens
    zeros_B = torch.zeros(streams.branches, dtype=base.dtype, device=base.device)
    sums_B = zeros_B.index_add(0, streams.pair_branches, (streams.logprobs.detach() - base)[at])
    counts_B = zeros_B.index_add(0, streams.pair_branches, streams.mask[at].to(base.dtype))
    return sums_B / counts_B.clamp(min=1)


def any_pair(streams: Streams, flags: Tensor) -> Tensor:
    """Which tokens have a pair where `flags` `[M]` is on, bool `[N]`."""
    found_N = torch.zeros_like(streams.mask, dtype=torch.int64)
    return found_N.index_add(0, streams.pair_tokens, flags.to(torch.int64)) > 0
