"""`topr`: what failed counts less the less likely it has become; what succeeded counts in full."""

from __future__ import annotations

import torch

from common.config_learner import LossConfig
from learner.loss.base import MAX_LOG_RATIO, TokenLoss, any_pair, cleaned, mean_log_ratio
from learner.streams import Streams


def topr(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−c A log π_θ of each pair: c = 1 where A ≥ 0, else sg(clip(ρ, 0, 1)).

    ρ = (π_θ / μ)^(1 / tokens) is the length-normalised ratio of the pair's branch to the behaviour policy,
    over the tokens which that branch trains. See "Tapered Off-Policy REINFORCE" (arXiv 2503.14286, §3, with
    a⁺ = b⁺ = 1, a⁻ = 0, b⁻ = 1; verl normalises ρ by the length). The paper tells trajectories apart by the
    sign of their reward, here each turn's advantage has its own. It has no constants, no clip that takes the
    gradient, and no KL term.

    Only the weight `none` is sound beside it: ρ is the whole correction, and it leaves what succeeded
    unweighted on purpose. Another weight would correct failures twice and successes after all.
    """
    del settings
    s = cleaned(streams)
    rho_B = torch.exp(mean_log_ratio(s, s.behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    rho_M, paid_M = rho_B[s.pair_branches], s.pair_weights * s.pair_advantages
    kept_M = torch.where(paid_M < 0, rho_M.clamp(0, 1), torch.ones_like(rho_M))
    loss_M = -kept_M * paid_M * s.logprobs[s.pair_tokens]
    return TokenLoss(s.per_token(loss_M), any_pair(s, (paid_M < 0) & (rho_M > 1)))
