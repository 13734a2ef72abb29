"""What an update says about itself: ratios, clipping, entropy, lag, mismatch between trainer and engine.

Collected over the first pass of a batch: its minibatches show how far the weights move within it. N = tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as dump_tensors
from torch import Tensor

from learner.batching import MicroBatch
from learner.loss.base import ratio
from learner.objective import Parts
from learner.policy import TokenLogprobs

QUANTILES = (0.01, 0.5, 0.99)
"""Of the importance ratios: the spread matters, a mean near 1 hides it (TRL #6789)."""


@dataclass(slots=True)
class TokenLog:
    """Streams of the tokens trained so far, one tensor for each micro-batch."""

    ratios: list[Tensor] = field(default_factory=list)
    entropies: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    limited: list[Tensor] = field(default_factory=list)
    dropped: list[Tensor] = field(default_factory=list)
    """Tokens whose behaviour weight is 0: their gradient is gone, not only bounded."""
    kls: list[Tensor] = field(default_factory=list)
    """The KL term of each token, coefficients included, where there is one."""
    lags: list[Tensor] = field(default_factory=list)
    moved: bool = False
    """Whether the weights have been stepped since the batch began."""
    gaps: list[Tensor] = field(default_factory=list)
    """|log π_θ − log π_behaviour| of tokens sampled by these very weights: what two programs disagree on."""

    def add(self, batch: MicroBatch, policy: TokenLogprobs, parts: Parts) -> None:
        """Take in one micro-batch."""
        logprobs = policy.logprobs.detach().cpu()
        behaviour, lags = batch.behaviour_N.cpu(), batch.lags_N.cpu()
        self.ratios.append(ratio(logprobs, behaviour))
        self.entropies.append(policy.entropies.detach().cpu())
        self.clipped.append(parts.loss.clipped.cpu())
        self.limited.append(parts.weight.limited.cpu())
        self.dropped.append((parts.weight.weight == 0).cpu())
        self.lags.append(lags)
        if parts.kl is not None:
            self.kls.append(parts.kl.cpu())
        if not self.moved:
            self.gaps.append((logprobs - behaviour).abs()[lags == 0])

    def to_bytes(self) -> bytes:
        """Its streams, for another rank."""
        return dump_tensors({name: torch.cat([torch.empty(0), *getattr(self, name)]) for name in STREAMS})

    @classmethod
    def merged(cls, parts: Iterable[bytes]) -> TokenLog:
        """The logs of all ranks as one."""
        log = cls()
        for part in parts:
            for name, values in parse_tensors(part).items():
                getattr(log, name).append(values)
        return log


STREAMS = ("ratios", "entropies", "clipped", "limited", "dropped", "kls", "lags", "gaps")


def summarise(log: TokenLog, max_lag: int) -> dict[str, float]:
    """Metrics of one batch; empty when nothing was trained."""
    if not sum(map(len, log.ratios)):
        return {}
    ratios, lags = torch.cat(log.ratios), torch.cat(log.lags)
    gaps = torch.cat([torch.empty(0), *log.gaps])
    found = {
        "entropy": mean(torch.cat(log.entropies)),
        "clip_fraction": mean(torch.cat(log.clipped).float()),
        "weight_limited_fraction": mean(torch.cat(log.limited).float()),
        "drop_fraction": mean(torch.cat(log.dropped).float()),
        "ratio_ess": effective_sample_size(ratios),
        "ratio_max": float(ratios.max()),
        "kl_behaviour": mean(kl_k3(ratios)),
        "lag_mean": mean(lags.float()),
    }
    values = torch.quantile(_thinned(ratios), torch.tensor(QUANTILES))
    found.update({f"ratio_q{100 * q:02.0f}": float(v) for q, v in zip(QUANTILES, values, strict=True)})
    found.update({f"lag_share_{lag}": mean((lags == lag).float()) for lag in range(max_lag + 1)})
    if sum(map(len, log.kls)):
        found["kl_term"] = mean(torch.cat(log.kls))
    if len(gaps):
        found.update(logprob_gap=mean(gaps), logprob_gap_max=float(gaps.max()))
    return found


def effective_sample_size(weights: Tensor) -> float:
    """(Σw)² / (n Σw²) of importance weights `[n]`: 1 when all are equal, 1/n when one carries everything."""
    weights = weights.double()
    return float(weights.sum() ** 2 / (len(weights) * (weights**2).sum()))


def kl_k3(ratios: Tensor) -> Tensor:
    """r − 1 − log r of each token, r = π_θ / μ, `[n]`: never negative, and its mean over tokens of μ is an
    unbiased estimate of KL(μ ‖ π_θ) (Schulman 2020, "Approximating KL Divergence", k3). For small moves of r,
    in double precision: in single the difference is all rounding."""
    excess = ratios.double() - 1
    return excess - torch.log1p(excess)


def mean(values: Tensor) -> float:
    return float(values.double().mean())


MAX_QUANTILE_INPUT = 1 << 20
"""torch.quantile refuses more than 2^24 values, and sorting that many tells nothing more."""


def _thinned(values: Tensor) -> Tensor:
    return values[:: -(-len(values) // MAX_QUANTILE_INPUT)]
