"""Being written."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Rule, TreeView
from common.config_allocator import TraceRuleConfig


class TraceRule(Rule):
    """Being written."""

    name = "trace"
    reads: frozenset[EventKind] = frozenset()

    def __init__(self, config: TraceRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        return COMPLETE
