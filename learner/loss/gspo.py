"""`gspo`: one ratio for the whole sequence."""

from __future__ import annotations

import torch

from common.config_learner import LossConfig
from learner.loss.base import MAX_LOG_RATIO, TokenLoss, any_pair, cleaned, mean_log_ratio
from learner.streams import Streams


def gspo(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−min(s_t A, clip(s_t, 1 − ε_low, 1 + ε_high) A) of each pair: s_t = sg(s) · π_θ(t) / sg(π_θ(t)).

    s = (π_θ / π_old)^(1 / tokens) is the length-normalised ratio of the pair's branch, over the tokens which
    that branch trains. s_t has the value of s, and sends its gradient through the pair's own token, so that
    each turn can be paid its own advantage. See "Group Sequence Policy Optimization" (arXiv 2507.18071, §4.3,
    GSPO-token); ε = 3e-4 and 4e-4 in configs/learner/loss/gspo.yaml are that paper's (§5.1). Where all
    advantages of a branch are equal its gradient is that of GSPO (eq. 10) times the number of its tokens:
    the paper takes the mean over a sequence's tokens, here they are summed, as for every loss, and only
    constants divide.

    All behaviour weights may stand beside it: s then bounds how far the update moves a sequence from the
    proximal policy, and a weight for each token makes up for what lies before, as in verl. What the paper
    says against token weights, their variance, holds of them here too.
    """
    s = cleaned(streams)
    step_N = s.logprobs - s.logprobs.detach()
    mean_M = mean_log_ratio(s, s.old)[s.pair_branches].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    r_M = torch.exp(mean_M + step_N[s.pair_tokens])
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    risen, fallen = r_M.clamp(max=high), r_M.clamp(min=low)
    paid_M = s.pair_weights * s.pair_advantages
    loss_M = -paid_M * torch.where(paid_M > 0, risen, fallen)
    clipped_M = ((paid_M > 0) & (r_M > high)) | ((paid_M < 0) & (r_M < low))
    return TokenLoss(s.per_token(loss_M), any_pair(s, clipped_M))
