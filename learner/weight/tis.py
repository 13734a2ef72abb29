"""`tis`: truncated importance sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import WeightConfig
from learner.loss.base import ratio, replace_masked
from learner.weight.base import BehaviourWeight, TokenWeight, batch_start


def weigh(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: WeightConfig) -> TokenWeight:
    """w = min(π_prox / π_behaviour, C), detached, one a token; C = 2 in tis.yaml, as in verl and slime.

    As in verl's rollout correction (`rollout_is=token`): the log-ratio is clamped to ± 20 before exp, π_prox
    is recomputed by the trainer under the weights at the start of the batch (verl's `old_log_prob`), the
    loss's own ratio is π_θ / π_prox, and w multiplies the loss after its clip. Taking the loss's ratio
    against the behaviour policy as well would correct twice. See "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training" (Yao et al. 2025) for the truncation.
    """
    proximal, behaviour = replace_masked(proximal.detach(), mask), replace_masked(behaviour, mask)
    full = ratio(proximal, behaviour)
    return TokenWeight(torch.clamp(full, max=settings.cap), (full > settings.cap) & mask)


TIS = BehaviourWeight("tis", proximal=True, proximal_of=batch_start, weigh=weigh)
