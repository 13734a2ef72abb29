"""`cispo`: the importance weight is clipped, never the gradient."""

from __future__ import annotations

from common.config_learner import LossConfig
from learner.loss.base import TokenLoss, cleaned, ratio
from learner.streams import Streams


def cispo(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−sg(clip(r, 1 − ε_low, 1 + ε_high)) A log π_θ of each pair, r = π_θ / π_old.

    See "MiniMax-M1" (arXiv 2506.13585, §3.1, eq. 4). There ε_low is so large that nothing is clipped below,
    and the paper gives no ε_high; configs/learner/loss/cispo.yaml has SkyRL's bounds, [0, 5]. A clipped token
    keeps its gradient, where `ppo` takes it away. With ε_low = 1 and ε_high = 0.02 this is the REINFORCE of
    PipelineRL (arXiv 2509.19128): sg(min(π / μ, 1.02)).

    All behaviour weights are sound, as with `ppo`: r is a factor of the importance weight of the token, the
    behaviour weight the other one.
    """
    s = cleaned(streams)
    r = ratio(s.logprobs, s.old).detach()
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    paid = s.positive - s.negative
    # A shared token's coefficients may cancel in the sum; each of them was clipped all the same.
    clipped = ((r < low) | (r > high)) & (s.positive + s.negative > 0)
    return TokenLoss(-r.clamp(low, high) * paid * s.logprobs, clipped)
