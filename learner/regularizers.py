"""Terms of the objective without an advantage: divergence from a frozen reference, and entropy.

Both are per token, times the token's summed branch weight, and join the policy loss before the one division;
the behaviour weight does not multiply them. On stale data they are averages over the prefixes and
tokens of the policy that sampled. Masked entries may hold anything, NaN included.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from common.config_learner import RegularizerConfig
from learner.loss.base import MAX_LOG_RATIO, replace_masked


def k1(log_ratio: Tensor) -> Tensor:
    """δ = log π − log ref: its mean is KL(π ‖ ref), but its gradient ∇ log π has mean zero. As a term of the
    loss it says nothing; as part of a reward, where it is no function of π_θ, it would."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """δ² / 2: its mean is a little off, its gradient δ ∇ log π has the mean ∇ KL(π ‖ ref), exactly."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """ref / π − 1 + δ ≥ 0: its mean is KL(π ‖ ref) with little variance, its gradient (1 − ref / π) ∇ log π
    has the mean ∇ KL(ref ‖ π), the divergence the other way round."""
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(-bounded) - 1 + bounded


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""`learner.regularizer.kl_estimator` to its function of δ. See "Approximating KL Divergence" (Schulman 2020)
for the three; what their gradients are is above, for tokens sampled from π, one prefix at a time."""


def reference_kl(
    logprobs: Tensor, reference: Tensor, weights: Tensor, mask: Tensor, settings: RegularizerConfig
) -> Tensor:
    """coefficient · weight · k(log π_θ − log ref) of each token, `[N]`, 0 where masked: added to the loss.

    Args:
        logprobs: log π_θ, `[N]`, with gradient.
        reference: log-probabilities of the same tokens under the reference (`learner.reference`), `[N]`.
        weights: what each token is worth without its advantage, `[N]`.
        mask: tokens that count, bool `[N]`.
        settings: kl_coefficient and kl_estimator.
    """
    log_ratio = replace_masked(logprobs, mask) - replace_masked(reference.detach(), mask)
    paid = settings.kl_coefficient * replace_masked(weights, mask)
    return paid * ESTIMATORS[settings.kl_estimator](log_ratio)


def entropy_bonus(entropies: Tensor, weights: Tensor, mask: Tensor, settings: RegularizerConfig) -> Tensor:
    """coefficient · weight · H of each token, `[N]`, 0 where masked: subtracted from the loss.

    Args:
        entropies: of the distribution each token was drawn from, in nats, `[N]`, with gradient.
        weights: what each token is worth without its advantage, `[N]`.
        mask: tokens that count, bool `[N]`.
        settings: entropy_coefficient.
    """
    return settings.entropy_coefficient * replace_masked(weights, mask) * replace_masked(entropies, mask)
