"""Being written."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Rule, TreeView
from common.config_allocator import EntropyRuleConfig


class EntropyRule(Rule):
    """Being written."""

    name = "entropy"
    reads: frozenset[EventKind] = frozenset()

    def __init__(self, config: EntropyRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        return COMPLETE
