"""`reinforce`: the policy gradient as it is."""

from __future__ import annotations

import torch

from common.config_learner import LossConfig
from learner.loss.base import TokenLoss, cleaned
from learner.streams import Streams


def reinforce(streams: Streams, settings: LossConfig) -> TokenLoss:
    """−A log π_θ of each pair: no ratio, no clip.

    See "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (Williams
    1992, §4). On data of older policies it is biased unless something else makes up for them, a behaviour
    weight or a credit that carries its own ratios (V-trace): all weights are sound beside it. The clamped
    ratio that PipelineRL multiplies in is `cispo` with clip_low = 1 and clip_high = 0.02.

    Several optimiser steps on one batch are off-policy as well, and nothing here holds them back.
    """
    del settings
    s = cleaned(streams)
    return TokenLoss((s.negative - s.positive) * s.logprobs, torch.zeros_like(s.mask))
