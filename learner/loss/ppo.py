"""`ppo`: the clipped surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import LossConfig
from learner.loss.base import TokenLoss, ratio, replace_masked


def ppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, settings: LossConfig
) -> TokenLoss:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) of each token, r = π_θ / π_old.

    See "Proximal Policy Optimization Algorithms" (arXiv 1707.06347, eq. 7); ε = 0.2 on both sides is that
    paper's, ε_high = 0.28 is DAPO's (arXiv 2503.14476, §3.1). π_old is the behaviour policy, or the proximal
    one where the behaviour weight brings its own correction (`learner.weight`).

    Args:
        logprobs: log π_θ of the tokens sampled, `[N]`, with gradient.
        old_logprobs: log π_old of the same tokens, `[N]`.
        advantages: A, `[N]`.
        mask: tokens that count, bool `[N]`.
        settings: clip_low and clip_high.
    """
    logprobs = replace_masked(logprobs, mask)
    old_logprobs = replace_masked(old_logprobs, mask)
    advantages = replace_masked(advantages, mask)
    r = ratio(logprobs, old_logprobs.detach())
    clipped_r = torch.clamp(r, 1 - settings.clip_low, 1 + settings.clip_high)
    surrogate, clipped_surrogate = r * advantages, clipped_r * advantages
    loss = replace_masked(-torch.minimum(surrogate, clipped_surrogate), mask)
    return TokenLoss(loss, (clipped_surrogate < surrogate) & mask)
