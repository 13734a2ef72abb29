"""`decoupled`: the proximal policy is apart from the behaviour policy."""

from __future__ import annotations

import torch
from torch import Tensor

from common.config_learner import ProximalPolicy, WeightConfig
from learner.loss.base import ratio, replace_masked
from learner.weight.base import BehaviourWeight, TokenWeight, batch_start


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


def proximal_of(
    current: Tensor, behaviour: Tensor, lags: Tensor, recomputed: Tensor | None, settings: WeightConfig
) -> Tensor:
    """The policy at the start of the batch: recomputed, or interpolated where the settings say so."""
    if settings.proximal is ProximalPolicy.INTERPOLATED:
        return interpolated(current, behaviour, lags)
    return batch_start(current, behaviour, lags, recomputed, settings)


def interpolated(current: Tensor, behaviour: Tensor, lags: Tensor) -> Tensor:
    """log π_prox ≈ log μ + α (log π_θ − log μ), α = lag / (lag + 1): no second forward pass.

    AReaL's `loglinear` ("Proximal Log-Probability Approximation" in its documentation) takes
    α = (v_prox − v_behave) / (v_θ − v_behave) with v_prox = v_θ − 1: log-probabilities are taken to move by
    the same amount in each update. Our lag counts from the weights at the start of the batch, which are the
    proximal ones, so v_prox − v_behave = lag, and π_θ is on its way to the next version, v_prox + 1: the line
    from μ to π_θ is lag + 1 updates long, and the proximal policy lies lag updates along it. A token sampled
    by the proximal policy itself has lag 0, hence α = 0 and π_prox = μ.

    r · w = (π_θ / π_prox) (π_prox / μ) = π_θ / μ whatever α is: only where clip and cap fall is approximate.
    π_θ is taken to be a whole update ahead from the first minibatch on; before the first step of a batch r is
    (π_θ / μ)^(1 / (lag + 1)) where a recomputed proximal policy gives exactly 1.
    """
    behaviour = behaviour.detach()
    lag = lags.clamp(min=0).to(behaviour.dtype)
    return behaviour + lag / (lag + 1) * (current.detach() - behaviour)


DECOUPLED = BehaviourWeight("decoupled", proximal=True, proximal_of=proximal_of, weigh=weigh)
