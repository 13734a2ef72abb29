"""`none`: no weight; the loss's own ratio π_θ / π_behaviour is the whole correction."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import WeightConfig
from learner.weight.base import BehaviourWeight, TokenWeight


def proximal_of(
    current: Tensor, behaviour: Tensor, lags: Tensor, recomputed: Tensor | None, settings: WeightConfig
) -> Tensor:
    """The behaviour policy itself: plain PPO, whose r is π_θ / π_behaviour (verl's bypass mode)."""
    del current, lags, recomputed, settings
    return behaviour.detach()


def weigh(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: WeightConfig) -> TokenWeight:
    """w = 1 for every token."""
    del proximal, settings
    return TokenWeight(torch.ones_like(behaviour), torch.zeros_like(mask))


NONE = BehaviourWeight("none", proximal=False, proximal_of=proximal_of, weigh=weigh)
