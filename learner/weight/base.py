"""What a behaviour weight takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from common.config_learner import WeightConfig


class TokenWeight(NamedTuple):
    """A weight for each token."""

    weight: Tensor
    """w, `[N]`, without gradient; multiplies the token's loss after its clip."""
    limited: Tensor
    """`[N]` bool: the cap changed this token's weight."""


@dataclass(frozen=True, slots=True)
class BehaviourWeight:
    """One method: which policy the loss's ratio is taken against, and the weight that makes up for it."""

    proximal: bool
    """Whether π_old is the proximal policy (weights at the start of the batch), or the behaviour one."""
    weigh: Callable[[Tensor, Tensor, Tensor, WeightConfig], TokenWeight]
    """(proximal_logprobs, behaviour_logprobs, mask, settings), streams `[N]`. Masked entries may hold NaN."""
