"""Being written."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Rule, TreeView
from common.config_allocator import PatrRuleConfig


class PatrRule(Rule):
    """Being written."""

    name = "patr"
    reads: frozenset[EventKind] = frozenset()

    def __init__(self, config: PatrRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        return COMPLETE
