"""Budgets by name: a closed registry."""

from __future__ import annotations

from allocator.budgets.base import Budget
from allocator.budgets.fixed import FixedBudget
from common.config import BudgetConfig
from common.errors import ConfigError, nearest

NAMES = ("fixed",)


def make_budget(config: BudgetConfig) -> Budget:
    """The budget that `allocator.budget` names. Raises `ConfigError` for an unknown one."""
    if config.name == "fixed":
        return FixedBudget(config.continuations)
    raise ConfigError(
        f"allocator.budget.name must be one of {', '.join(NAMES)}{nearest(config.name, NAMES)}, "
        f"got {config.name!r}"
    )
