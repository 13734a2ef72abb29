"""Being written."""

from __future__ import annotations

from allocator.budgets.fixed import FixedBudget
from common.config_allocator import TraceRootsConfig


class TraceRootsBudget(FixedBudget):
    """Being written."""

    name = "trace_roots"

    def __init__(self, config: TraceRootsConfig, batch_trees: int) -> None:
        super().__init__(config.continuations)
