"""Being written."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Rule, TreeView
from common.config_allocator import UucbRuleConfig


class UucbRule(Rule):
    """Being written."""

    name = "uucb"
    reads: frozenset[EventKind] = frozenset()

    def __init__(self, config: UucbRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        return COMPLETE
