"""`icepop`: tokens on which the two policies disagree too much, either way, are left out."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import WeightConfig
from learner.loss.base import ratio, replace_masked
from learner.weight.base import BehaviourWeight, TokenWeight, batch_start


def weigh(proximal: Tensor, behaviour: Tensor, mask: Tensor, settings: WeightConfig) -> TokenWeight:
    """w = ρ where floor ≤ ρ ≤ cap, else 0; ρ = π_prox / π_behaviour, detached, one a token.

    See "Every Step Evolves" (Ring-1T, arXiv 2510.18855) for the method; [0.5, 5] in icepop.yaml are the
    bounds that NeMo-RL gives as its reference. There ρ is the mismatch of trainer and engine under the same
    weights; here it holds the staleness too. `decoupled` has the same cap and no floor: here tokens that have
    become half as likely are left out, which `decoupled` only weighs less. Masked tokens stay in every
    denominator, since those are constants.
    """
    proximal, behaviour = replace_masked(proximal.detach(), mask), replace_masked(behaviour, mask)
    full = ratio(proximal, behaviour)
    outside = (full < settings.floor) | (full > settings.cap)
    return TokenWeight(torch.where(outside, torch.zeros_like(full), full), outside & mask)


ICEPOP = BehaviourWeight("icepop", proximal=True, proximal_of=batch_start, weigh=weigh)
