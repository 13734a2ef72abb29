"""What one micro-batch adds to the objective of an update.

    log π_θ ─▶ policy loss (coefficients inside) · behaviour weight
            +  KL to the reference  −  entropy bonus                      (each · summed branch weight)

A sum over the micro-batch's tokens; the update divides it once by a constant. Shapes: N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.config_learner import LearnerConfig
from learner.batching import MicroBatch
from learner.loss import LOSSES, TokenLoss
from learner.policy import TokenLogprobs
from learner.regularizers import entropy_bonus, reference_kl
from learner.weight import WEIGHTS, TokenWeight


@dataclass(frozen=True, slots=True)
class Parts:
    """An objective and what it was made of, for the diagnostics."""

    total: Tensor
    """Scalar with gradient."""
    loss: TokenLoss
    weight: TokenWeight
    old: Tensor
    """`[N]` log π_old of the policy loss's ratio."""
    kl: Tensor | None
    """`[N]` KL to the reference, detached, where one is asked for."""


class Objective:
    """The loss, the behaviour weight and the regularisers that the settings name."""

    def __init__(self, settings: LearnerConfig) -> None:
        self._settings = settings
        self._loss = LOSSES[settings.loss.name]
        self._weight = WEIGHTS[settings.weight.name]

    @property
    def needs_proximal_pass(self) -> bool:
        """Whether π_prox must be computed before the first step.

        With one optimiser step a batch the proximal policy is the current one: its log-probabilities are
        those of the same forward pass, detached. Where it is interpolated no pass is needed either.
        """
        loss = self._settings.loss
        return self._weight.recomputed(self._settings.weight) and loss.epochs * loss.minibatches > 1

    @property
    def trains_unpaid(self) -> bool:
        """Whether tokens whose advantage is zero have a gradient too."""
        return self._loss.trains_unpaid or self.needs_reference or self.needs_entropy_gradient

    @property
    def needs_entropy_gradient(self) -> bool:
        return self._settings.regularizer.entropy_coefficient != 0

    @property
    def needs_reference(self) -> bool:
        return self._settings.regularizer.kl_coefficient != 0

    def __call__(
        self, batch: MicroBatch, policy: TokenLogprobs, proximal: Tensor | None, reference: Tensor | None
    ) -> Parts:
        """The objective of a micro-batch, not divided.

        Args:
            batch: its tokens and coefficients.
            policy: log π_θ and entropies, with gradient.
            proximal: log π at the start of the batch, `[N]`, where a pass computed it.
            reference: log π_ref, `[N]`, where `needs_reference`.
        """
        settings, mask = self._settings, torch.ones_like(batch.lags_N, dtype=torch.bool)
        current = policy.logprobs.detach()
        start = current if proximal is None else proximal
        prox = self._weight.proximal_of(current, batch.behaviour_N, batch.lags_N, start, settings.weight)
        weight = self._weight.weigh(prox, batch.behaviour_N, mask, settings.weight)
        old = prox if self._weight.proximal else batch.behaviour_N
        loss = self._loss.function(batch.streams(policy.logprobs, old), settings.loss)
        total = (weight.weight * loss.loss).sum()
        kl = None
        if reference is not None:
            kl = reference_kl(policy.logprobs, reference, batch.weights_N, mask, settings.regularizer)
            total = total + kl.sum()
        if self.needs_entropy_gradient:
            total = total - entropy_bonus(policy.entropies, batch.weights_N, mask, settings.regularizer).sum()
        return Parts(total, loss, weight, old, None if kl is None else kl.detach())
