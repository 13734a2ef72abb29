"""Many trees of a forest at once, whose continuations end in any order, with a check after everything that happens.

The continuation `number` of the tree in `slot` (of the how-many-th tree there) ends as it ends whatever the order:
what differs between two groves of one seed is only who was first.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from allocator.budgets.base import Budget
from allocator.forest import Forest
from allocator.rules.base import Rule
from allocator.rules.flat import FlatRule
from allocator.tree import Branch, GrowingTree
from allocator.waves import Waves
from common.nouns import Ending, Outcome, RewardSource, Turn, TurnStatus, Version, VersionRun, floats_to_bytes
from common.predictor import HistoryPredictor, Predictor
from tests.allocator.harness import small


class Grove:
    """See the module.

    Args:
        order: seed of the order; None = one tree after the other, by slot.
        lag: waves that may be open beyond the first one that is not complete.
        dropped: share of continuations, and of prompts, that are given up.
        check: called after everything that happens.
    """

    def __init__(
        self,
        budget: Budget,
        batch: int,
        seed: int,
        order: int | None = None,
        *,
        lag: int = 0,
        dropped: float = 0.0,
        rule: Rule | None = None,
        predictor: Predictor | None = None,
        check: Callable[[Grove], None] = lambda grove: None,
    ) -> None:
        self.budget = budget
        predictor = predictor or HistoryPredictor()
        self.forest = Forest(small(batch_trees=batch), rule or FlatRule(), budget, predictor)
        self.waves = Waves(predictor, budget, batch)
        self.batch, self.seed, self.lag, self.dropped, self.check = batch, seed, lag, dropped, check
        self.order = None if order is None else random.Random(order)
        self.allowances: dict[int, list[int]] = {}
        """By slot, of every tree there that was closed, in order."""
        self.regular: dict[int, int] = {}
        """Regular continuations of closed trees, by wave; of dropped ones, too."""
        self.told: dict[int, list[list[float]]] = {}
        """By slot, the outcomes of those trees, by continuation."""
        self.open_slots: list[int] = []
        self.complete: set[int] = set()
        self.opened = 0
        self.tries: dict[int, int] = {}
        self.extra_granted = 0

    def draw(self, *key: int) -> float:
        return random.Random("/".join(map(str, (self.seed, *key)))).random()

    def run(self, waves: int) -> Grove:
        """Grow that many waves to their ends."""
        waiting = list(range(waves * self.batch))
        while waiting or self.forest.trees:
            opened = self.open_next(waiting)
            self.settle()
            running = [
                b for tree in self.forest.trees.values() for b in tree.branches.values() if not b.ended
            ]
            if running:
                self.end(self.order.choice(running) if self.order else running[0])
                self.settle()
            assert running or opened or not self.forest.trees, "nothing runs, and nobody is asked"
        return self

    def open_next(self, waiting: list[int]) -> bool:
        """Open what may be opened: all slots, or the next one when the last tree is done."""
        opened = False
        while waiting and waiting[0] // self.batch <= self.waves.next + self.lag:
            if self.order is None and self.forest.trees:
                break
            self.open(waiting.pop(0))
            opened = True
        return opened

    def open(self, slot: int) -> None:
        """A tree for a slot; now and then it cannot be set up, and another one comes."""
        wave, tries = slot // self.batch, self.tries.get(slot, 0)
        self.tries[slot] = tries + 1
        tree = self.forest.open(self.opened, slot, wave, Version(0, 0))
        self.opened += 1
        if tries == 0 and self.draw(slot, tries, -1) < self.dropped / 4:
            self.forest.remove(tree)
            self.open(slot)
            return
        self.forest.root(tree, Turn(observation=b"\1\0\0\0"), None)

    def settle(self) -> None:
        forest = self.forest
        while forest.settled:
            tree = forest.trees.get(forest.settled.popleft())
            if tree is None:
                continue
            tree.settled = False
            if tree.outstanding == 0:
                self.ask(tree)
            self.check(self)
        forest.wanting.clear()

    def ask(self, tree: GrowingTree) -> None:
        before = tree.allowance or 0
        decision, branches = self.forest.decide(tree)
        self.extra_granted += (tree.allowance or 0) - before
        if not branches and not tree.parked:
            assert decision.complete
            self.close(tree)

    def close(self, tree: GrowingTree) -> None:
        found = [b.outcome.raw_reward for b in tree.branches.values() if b.outcome is not None]
        spent = min((tree.allowance or 0) - tree.budget_left, self.budget.typical)
        self.regular[tree.wave] = self.regular.get(tree.wave, 0) + spent
        if self.forest.close(tree) is None:
            self.waves.give_up(tree)
            self.open(tree.slot)
            return
        self.allowances.setdefault(tree.slot, []).append(tree.allowance or 0)
        self.told.setdefault(tree.slot, []).append(found)
        self.waves.complete(tree)

    def end(self, branch: Branch) -> None:
        """A continuation of one or more turns, to its end."""
        tree = branch.tree
        key = (tree.slot, self.tries[tree.slot], branch.number)
        turns = 1 + int(3 * self.draw(*key, 0))
        reward = float(self.draw(*key, 1) < self.draw(tree.slot, self.tries[tree.slot]))
        for offset in range(turns):
            last = offset == turns - 1
            self.forest.expand(branch, a_turn(self.draw(*key, 2, offset), reward if last else 0.0, last), [])
        if self.draw(*key, 3) < self.dropped:
            self.forest.end(branch, "dropped: broken", None)
            return
        self.forest.end(
            branch, "finished", Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)
        )


def a_turn(entropy: float, reward: float, last: bool) -> Turn:
    """Two tokens."""
    return Turn(
        action=b"\1\0\0\0" * 2,
        logprobs=b"\0\0\0\0" * 2,
        entropies=floats_to_bytes([entropy, entropy]),
        versions=[VersionRun(Version(0, 0), 2)],
        reward=reward,
        status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
    )
