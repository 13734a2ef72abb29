"""Budgets by name: a closed registry."""

from __future__ import annotations

from allocator.budgets.adaptive import AdaptiveBudget
from allocator.budgets.base import Budget
from allocator.budgets.fixed import FixedBudget
from allocator.budgets.trace_roots import TraceRootsBudget
from common.config_allocator import AdaptiveConfig, BudgetConfig, TraceRootsConfig
from common.errors import ConfigError, nearest

NAMES = ("fixed", "trace_roots", "adaptive")


def make_budget(config: BudgetConfig, batch_trees: int = 1, unit: int = 1) -> Budget:
    """The budget that `allocator.budget` names, for waves of `batch_trees` prompts and a branch rule under
    which a sample from the root costs `unit` continuations (`common.config_allocator.root_cost`).

    Raises:
        ConfigError: there is none of that name.
    """
    match config:
        case TraceRootsConfig():
            return TraceRootsBudget(config, batch_trees, unit)
        case AdaptiveConfig():
            return AdaptiveBudget(config, batch_trees)
    if config.name == "fixed":
        return FixedBudget(config.continuations)
    raise ConfigError(
        f"allocator.budget.name must be one of {', '.join(NAMES)}{nearest(config.name, NAMES)}, "
        f"got {config.name!r}"
    )
