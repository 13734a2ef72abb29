"""`dppo`: a trust region in probabilities instead of ratios."""

from __future__ import annotations

from common.config_learner import LossConfig
from learner.loss.base import TokenLoss, cleaned, ratio, replace_masked
from learner.streams import Streams


def dppo(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−keep · A · π_θ / μ of each pair, and penalty · weight · (log π_θ / μ)² of each.

    A pair with A > 0 is dropped where π_θ − μ > `clip_high`, one with A ≤ 0 where π_θ − μ < −`clip_low`:
    moved far enough, and asked to move on. A ratio says little about unlikely tokens, which a ratio clip
    holds back, and lets likely ones move far; the difference of probabilities of the sampled token bounds the
    total variation from below ("Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879,
    DPPO-Binary-TV). The form and the constants are prime-rl's default since April 2026: 0.2 on both sides,
    and the penalty 1e-3, which is not masked; it pulls towards the policy that sampled, whatever the
    advantage.

    Only the weight `none` is sound beside it: both mask and ratio are against the behaviour policy, so that
    another weight would correct twice.
    """
    s = cleaned(streams)
    log_ratio = s.logprobs - s.behaviour
    moved = s.logprobs.detach().exp() - s.behaviour.exp()
    risen, fallen = moved > settings.clip_high, moved < -settings.clip_low
    paid = replace_masked(s.positive, ~risen) - replace_masked(s.negative, ~fallen)
    penalty = settings.log_ratio_penalty * s.weights * log_ratio.square()
    clipped = ((s.positive > 0) & risen) | ((s.negative > 0) & fallen)
    return TokenLoss(penalty - paid * ratio(s.logprobs, s.behaviour), clipped)
