"""Anything may happen in any order with pools and rescues too: the conservation law holds after each step."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from allocator.budgets.adaptive import AdaptiveBudget
from allocator.budgets.base import Budget
from common.config_allocator import AdaptiveConfig, TraceRootsConfig
from tests.allocator.budgets.test_trace_roots import Guessing
from tests.allocator.test_machine import AllocatorMachine


class BudgetMachine(AllocatorMachine):
    @initialize(
        branch_rule=st.sampled_from(["flat", "random"]),
        candidates=st.sampled_from([0, 1, 2, 3]),
        staleness=st.sampled_from([0, 5]),
        lag=st.sampled_from([0, 1]),
    )
    def begin(self, branch_rule: str, candidates: int, staleness: int, lag: int) -> None:
        """`candidates` = 0: rescues, else pools."""
        budget: Budget = AdaptiveBudget(AdaptiveConfig(continuations=4, overhead=0.5, extra=2), 2)
        if candidates:
            budget = Guessing(TraceRootsConfig(continuations=4, candidates=candidates), 2)
        self.prepare(branch_rule, budget, staleness, lag)
        self.limit += 3 * 2 * max(0, candidates - 1)


BudgetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestBudgetMachine = BudgetMachine.TestCase
