"""Policy losses: pure functions on token streams that divide nothing. One small module per method."""

from __future__ import annotations

from collections.abc import Mapping

from learner.loss.base import Loss, TokenLoss
from learner.loss.ppo import ppo

LOSSES: Mapping[str, Loss] = {"ppo": ppo}
"""`learner.loss.name` to its function."""

__all__ = ["LOSSES", "Loss", "TokenLoss"]
