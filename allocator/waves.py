"""Evidence for the success predictor, let in between waves.

A wave is the trees of one training batch. Wave w's evidence enters when w is complete and all earlier waves
have entered, in order of (tree, continuation): what the predictor knows then depends neither on the order
of arrival nor on which tree of the wave was last.
"""

from __future__ import annotations

from allocator.budgets.base import Budget
from allocator.tree import GrowingTree
from common.predictor import Predictor, Target


class Waves:
    """Buffers targets by wave and updates the predictor wave by wave."""

    def __init__(self, predictor: Predictor, budget: Budget, batch: int) -> None:
        self.predictor = predictor
        self.budget = budget
        self.batch = batch
        self.next = 0
        """First wave that has not entered."""
        self.censored = 0
        """Continuations that gave no target: dropped, alone or with their tree, pruned or pseudo-rewarded."""
        self.targets = 0
        self._done: dict[int, set[int]] = {}
        self._evidence: dict[int, list[tuple[int, list[Target]]]] = {}

    def give_up(self, tree: GrowingTree) -> None:
        """A tree was dropped without any outcome: it has no evidence, and its slot waits for another."""
        self.censored += len(tree.branches)

    def complete(self, tree: GrowingTree) -> None:
        """A tree is complete: buffer what it says, and let in every wave that is complete.

        A tree in a slot whose wave entered already (its first tree was dropped later) speaks in the next one.
        """
        found, censored = tree.targets()
        self.censored += censored
        self._evidence.setdefault(max(tree.wave, self.next), []).append((tree.id, found))
        if tree.wave >= self.next:
            self._done.setdefault(tree.wave, set()).add(tree.slot)
        while len(self._done.get(self.next, ())) == self.batch:
            del self._done[self.next]
            evidence = sorted(self._evidence.pop(self.next, []), key=lambda item: item[0])
            targets = [target for _, of_tree in evidence for target in of_tree]
            self.targets += len(targets)
            self.predictor.update(targets)
            self.budget.wave_done(self.next)
            self.next += 1
