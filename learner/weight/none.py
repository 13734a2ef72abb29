"""`none`: no weight; the loss's own ratio π_θ / π_behaviour is the whole correction."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import WeightConfig
from learner.weight.base import BehaviourWeight, TokenWeight


def weigh(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: WeightConfig) -> TokenWeight:
    """w = 1 for every token: plain PPO, whose r is π_θ / π_behaviour (verl's bypass mode)."""
    del proximal, settings
    return TokenWeight(torch.ones_like(behaviour), torch.zeros_like(mask))


NONE = BehaviourWeight(proximal=False, weigh=weigh)
