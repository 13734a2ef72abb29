"""A tree as it would look had some outcomes not come yet. What a rule says of it tells what they changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from allocator.rules.base import BranchView, Draws
from allocator.tree import GrowingTree
from common.nouns import ROOT, Node, Outcome
from common.predictor import Prediction
from common.prefix import Tally


@dataclass(frozen=True, slots=True)
class Pending:
    """A branch that has ended, shown as if it were still outstanding."""

    number: int
    group: int
    anchor: int
    nodes: Sequence[int]
    outcome: Outcome | None = None
    ended: str = ""


class Hindsight:
    """`tree` without the outcomes of the branches in `hidden`. Implements `rules.base.TreeView`.

    Turns stay visible: of a branch that is still running they are known, too.
    """

    def __init__(self, tree: GrowingTree, hidden: Collection[int]) -> None:
        self._tree = tree
        self.id, self.wave, self.allowance = tree.id, tree.wave, tree.allowance
        self.budget_left = tree.budget_left
        branches = tree.branches
        late = [branches[number] for number in sorted(hidden) if number in branches]
        shown: dict[int, BranchView] = {b.number: Pending(b.number, b.group, b.anchor, b.nodes) for b in late}
        self.branches: Mapping[int, BranchView] = {**branches, **shown}
        self._flying: dict[int, int] = {}
        self._unknown: dict[int, Tally] = {}
        for branch in late:
            self._flying[branch.anchor] = self._flying.get(branch.anchor, 0) + 1
            path = tree.path(tree.tip(branch))
            known = tree.path_success(branch, path)
            if known is not None:
                for node in path:
                    self._unknown[node.index] = self._unknown.get(node.index, Tally()).plus(known)

    def node(self, index: int) -> Node:
        return self._tree.node(index)

    def anchors(self) -> list[int]:
        return self._tree.anchors()

    def in_flight(self, index: int) -> int:
        return self._tree.in_flight(index) + self._flying.get(index, 0)

    def tally(self, index: int) -> Tally:
        all_known, late = self._tree.tally(index), self._unknown.get(index, Tally())
        return Tally(all_known.wins - late.wins, all_known.trials - late.trials)

    def predict(self, index: int) -> Prediction:
        return self._tree.predict_after(index, self.tally(ROOT), self.tally(index))

    def draws(self) -> Draws:
        return self._tree.draws()
