"""What a policy loss takes and gives, and arithmetic that the losses and weights share.

Shapes: every stream is `[N]`, one entry a token, in any order. Masked entries may hold anything, NaN
included: they are replaced before they are used, since 0 · NaN is NaN, forwards and backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from common.config_learner import LossConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, as in verl: e^20 is far above any clip or cap, and finite."""


class TokenLoss(NamedTuple):
    """A loss for each token."""

    loss: Tensor
    """`[N]`, 0 where masked; a sum over tokens is meant, divided once and elsewhere."""
    clipped: Tensor
    """`[N]` bool: the clip took this token's gradient."""


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, LossConfig], TokenLoss]
"""(logprobs, old_logprobs, advantages, mask, settings), each `[N]`; gradient flows through the first only."""


def replace_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where `mask` is off: no NaN survives there, nor reaches a gradient."""
    return torch.where(mask, values, torch.zeros_like(values))


def ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """π / π_base of each token from their log-probabilities, `[N]`, finite for finite inputs."""
    return torch.exp(torch.clamp(logprobs - base_logprobs, -MAX_LOG_RATIO, MAX_LOG_RATIO))
