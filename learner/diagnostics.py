"""What an update says about itself: ratios, clipping, entropy, lag, mismatch between trainer and engine.

Collected over the first pass of a batch: its minibatches show how far the weights move within it. N = tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from learner.batching import TrainBatch
from learner.loss import TokenLoss
from learner.loss.base import ratio
from learner.policy import TokenLogprobs
from learner.weight import TokenWeight

QUANTILES = (0.01, 0.5, 0.99)
"""Of the importance ratios: the spread matters, a mean near 1 hides it (TRL #6789)."""


@dataclass(slots=True)
class TokenLog:
    """Streams of the tokens trained so far, one tensor for each micro-batch."""

    ratios: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    limited: list[Tensor] = field(default_factory=list)
    lags: list[Tensor] = field(default_factory=list)
    moved: bool = False
    """Whether the weights have been stepped since the batch began."""
    gaps: list[Tensor] = field(default_factory=list)
    """|log π_θ − log π_behaviour| of tokens sampled by these very weights: what two programs disagree on."""

    def add(self, batch: TrainBatch, policy: TokenLogprobs, loss: TokenLoss, weight: TokenWeight) -> None:
        """Take in one micro-batch."""
        logprobs = policy.logprobs.detach()
        self.ratios.append(ratio(logprobs, batch.behaviour_N))
        self.entropies.append(policy.entropies)
        self.clipped.append(loss.clipped)
        self.limited.append(weight.limited)
        self.lags.append(batch.lags_N)
        if not self.moved:
            self.gaps.append((logprobs - batch.behaviour_N).abs()[batch.lags_N == 0])


def summarise(log: TokenLog, max_lag: int) -> dict[str, float]:
    """Metrics of one batch; empty when nothing was trained."""
    if not log.ratios:
        return {}
    ratios, lags = torch.cat(log.ratios), torch.cat(log.lags)
    gaps = torch.cat([torch.empty(0), *log.gaps])
    found = {
        "entropy": mean(torch.cat(log.entropies)),
        "clip_fraction": mean(torch.cat(log.clipped).float()),
        "weight_limited_fraction": mean(torch.cat(log.limited).float()),
        "ratio_ess": effective_sample_size(ratios),
        "ratio_max": float(ratios.max()),
        "lag_mean": mean(lags.float()),
    }
    values = torch.quantile(_thinned(ratios), torch.tensor(QUANTILES))
    found.update({f"ratio_q{100 * q:02.0f}": float(v) for q, v in zip(QUANTILES, values, strict=True)})
    found.update({f"lag_share_{lag}": mean((lags == lag).float()) for lag in range(max_lag + 1)})
    if len(gaps):
        found.update(logprob_gap=mean(gaps), logprob_gap_max=float(gaps.max()))
    return found


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / (n Σw²) of importance weights `[n]`: 1 when all are equal, 1/n when one carries everything."""
    weights = weights.double()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def mean(values: Tensor) -> float:
    return float(values.double().mean())


MAX_QUANTILE_INPUT = 1 << 20
"""torch.quantile refuses more than 2^24 values, and sorting that many tells nothing more."""


def _thinned(values: Tensor) -> Tensor:
    return values[:: -(-len(values) // MAX_QUANTILE_INPUT)]
