"""`fixed`: every prompt gets the same number of continuations."""

from __future__ import annotations

from collections.abc import Mapping

from allocator.budgets.base import Budget, Prompt
from allocator.rules.base import TreeView


class FixedBudget(Budget):
    """`continuations` G for each prompt, each of weight 1/G, so that a prompt weighs 1 however it grew."""

    name = "fixed"

    def __init__(self, continuations: int) -> None:
        self.typical = continuations

    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        return {prompt.tree: self.typical}

    def withdraw(self, tree: int, slot: int) -> Mapping[int, int]:
        return {}

    def extra(self, view: TreeView) -> int:
        return 0

    def weight(self, tree: int) -> float:
        return 1.0 / self.typical
