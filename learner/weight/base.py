"""What a behaviour weight takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.config_learner import ProximalPolicy, WeightConfig


class TokenWeight(NamedTuple):
    """A weight for each token."""

    weight: Tensor
    """w, `[N]`, without gradient; multiplies the token's loss after its clip."""
    limited: Tensor
    """`[N]` bool: a bound changed this token's weight."""


ProximalOf = Callable[[Tensor, Tensor, Tensor, Tensor | None, WeightConfig], Tensor]
"""(current, behaviour, lags, recomputed or None, settings), all `[N]`: log π_old of the loss's ratio, without
gradient.

`current` is log π_θ of this forward pass, `lags` the updates since a token was sampled, counted from the
weights at the start of the batch, `recomputed` the log-probabilities under those weights; None = no optimiser
step of the batch was made yet, so that `current` is that."""


@dataclass(frozen=True, slots=True)
class BehaviourWeight:
    """One method: which policy the loss's ratio is taken against, and the weight that makes up for it."""

    name: str
    proximal: bool
    """Whether π_old is a proximal policy, or the behaviour one."""
    proximal_of: ProximalOf
    weigh: Callable[[Tensor, Tensor, Tensor, WeightConfig], TokenWeight]
    """(what `proximal_of` gave, behaviour, mask, settings), streams `[N]`. Masked entries may hold NaN."""

    def recomputed(self, settings: WeightConfig) -> bool:
        """Whether it needs log-probabilities under the weights at the start of the batch: a forward pass
        without gradient over the whole batch, unless the batch is one optimiser step."""
        return self.proximal and settings.proximal is ProximalPolicy.RECOMPUTED


def batch_start(
    current: Tensor, behaviour: Tensor, lags: Tensor, recomputed: Tensor | None, settings: WeightConfig
) -> Tensor:
    """The policy at the start of the batch: recomputed, or the current one before the first step."""
    del behaviour, lags, settings
    return current.detach() if recomputed is None else recomputed.detach()
