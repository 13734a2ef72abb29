"""Being written."""

from __future__ import annotations

from allocator.budgets.fixed import FixedBudget
from common.config_allocator import AdaptiveConfig


class AdaptiveBudget(FixedBudget):
    """Being written."""

    name = "adaptive"

    def __init__(self, config: AdaptiveConfig, batch_trees: int) -> None:
        super().__init__(config.continuations)
