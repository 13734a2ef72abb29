"""Being written."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Rule, TreeView
from common.config_allocator import IgrpoRuleConfig


class IgrpoRule(Rule):
    """Being written."""

    name = "igrpo"
    reads: frozenset[EventKind] = frozenset()

    def __init__(self, config: IgrpoRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        return COMPLETE
