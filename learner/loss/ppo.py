"""`ppo`: the clipped surrogate."""

from __future__ import annotations

from common.config_learner import LossConfig
from learner.loss.base import TokenLoss, cleaned, ratio
from learner.streams import Streams


def ppo(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−min(r A, clip(r, 1 − ε_low, 1 + ε_high) A) of each pair, r = π_θ / π_old.

    See "Proximal Policy Optimization Algorithms" (arXiv 1707.06347, eq. 7); ε = 0.2 on both sides is that
    paper's, ε_high = 0.28 is DAPO's (arXiv 2503.14476, §3.1). With `dual_clip` = c > 1 the loss of a negative
    advantage is bounded too, by c |A| ("Mastering Complex Control in MOBA Games with Deep Reinforcement
    Learning", arXiv 1912.09729, eq. 3; c = 3 there and in verl).

    For A > 0 this is −A min(r, 1 + ε_high), for A < 0 it is |A| min(max(r, 1 − ε_low), c): linear in A on
    either side, so that the summed positive and negative coefficients of a shared token give the sum over its
    branches exactly.

    π_old is the behaviour policy, or the proximal one where the behaviour weight brings its own correction.
    All weights are sound: the clip bounds how far the update goes from π_old, and the weight, which
    multiplies after it, makes up for what lies between π_old and the behaviour policy.
    """
    s = cleaned(streams)
    r = ratio(s.logprobs, s.old)
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    risen, fallen = r.clamp(max=high), r.clamp(min=low)
    stopped = r < low
    if settings.dual_clip:
        fallen = fallen.clamp(max=settings.dual_clip)
        stopped = stopped | (r > settings.dual_clip)
    loss = s.negative * fallen - s.positive * risen
    clipped = ((s.positive > 0) & (r > high)) | ((s.negative > 0) & stopped)
    return TokenLoss(loss, clipped)
