"""`flat`: independent continuations from the prompt, the baseline of every comparison."""

from __future__ import annotations

from allocator.rules.base import COMPLETE, Decision, EventKind, Pick, Rule, Scored, TreeView
from allocator.rules.reading import from_the_prompt
from common.nouns import ROOT


class FlatRule(Rule):
    """All continuations start at the root, at once. It reads nothing, so no score can be stale."""

    name = "flat"
    reads: frozenset[EventKind] = frozenset()

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        return Decision(picks=(Pick(ROOT),) * view.budget_left)

    def explain(self, view: TreeView) -> list[Scored]:
        """There is only the prompt."""
        return from_the_prompt(view.budget_left)
