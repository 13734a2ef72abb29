"""`decoupled`: the proximal policy is apart from the behaviour policy."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import WeightConfig
from learner.loss.base import ratio, replace_masked
from learner.weight.base import BehaviourWeight, TokenWeight


def weigh(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: WeightConfig) -> TokenWeight:
    """w = π_prox / π_behaviour, detached, one a token, and 0 where it exceeds the cap.

    See "Batch size-invariance for policy optimization" (arXiv 2110.00641, §3) for the objective
    w · min(r A, clip(r) A) with r = π_θ / π_prox, and AReaL (arXiv 2505.24298, §5.2) for its use against
    staleness: level token, action mask, metric ratio. Its examples mask above 5, and so does
    configs/learner/weight/decoupled.yaml; `tis`, which only truncates, cuts at 2. Masked tokens stay in
    every denominator, since those are constants here.
    """
    proximal, behaviour = replace_masked(proximal.detach(), mask), replace_masked(behaviour, mask)
    full = ratio(proximal, behaviour)
    above = full > settings.cap
    return TokenWeight(torch.where(above, torch.zeros_like(full), full), above & mask)


DECOUPLED = BehaviourWeight(proximal=True, weigh=weigh)
