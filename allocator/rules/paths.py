"""Paths that come back to their rule at a horizon, for rules that go on level by level (`patr`, `igrpo`).

A path is a continuation and then, at each horizon, one of its heirs. It is *active* while it waits at its
horizon for the rule's word; it is over when the environment ended it, the rule stopped it, or its lease was
dropped. A dropped one is no outcome: it blocks no level and gets no heirs.
"""

from __future__ import annotations

from allocator.rules.base import BranchView, TreeView
from common.nouns import ROOT


def on_the_way(view: TreeView) -> bool:
    """Whether any continuation is outstanding."""
    return any(not branch.ended for branch in view.branches.values())


def active_paths(view: TreeView) -> list[BranchView]:
    """Paths that wait at their horizon, by number. Whoever has heirs has been answered."""
    answered = {branch.anchor for branch in view.branches.values()}
    return [b for b in view.branches.values() if b.ended == "horizon" and tip(b) not in answered]


def tip(branch: BranchView) -> int:
    """The last turn of a path that waits at its horizon."""
    return branch.nodes[-1]


def from_the_prompt(view: TreeView, group: int | None = None) -> int:
    """Continuations that started at the root, of one group or of all."""
    chosen = (b for b in view.branches.values() if group is None or b.group == group)
    return sum(branch.anchor == ROOT for branch in chosen)
