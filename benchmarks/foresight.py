"""What the synchronous search would have chosen: a tree as it will look once all that is outstanding has
ended.

A simulated world is a function of seeds, so the rest of a running continuation can be told at once. With
D = 0 the rule would have waited for it; asked about that tree, with the same draws, it says what it would
have chosen in the place of a speculative decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allocator.budgets.base import Prompt
from allocator.rules.base import BranchView, Decision, Draws, Rule
from allocator.tree import Branch, GrowingTree
from benchmarks.fleet_population import PopulationWorld
from common.nouns import ROOT, Ending, Node, Outcome, RewardSource, TurnStatus, Version
from common.predictor import Prediction
from common.prefix import EMPTY, Prefix, Tally, describe
from common.seeds import derive_seed, turn_seed


@dataclass(frozen=True, slots=True)
class Told:
    """An outstanding branch, shown as it will end."""

    number: int
    group: int
    anchor: int
    nodes: Sequence[int]
    outcome: Outcome
    ended: str = "finished"


class Foresight:
    """`tree` with the ends of all that is outstanding. Implements `rules.base.TreeView`."""

    def __init__(self, tree: GrowingTree, world: PopulationWorld, version: Version) -> None:
        self._tree = tree
        self._world, self._version = world, version
        self.id, self.wave, self.allowance = tree.id, tree.wave, tree.allowance
        self.budget_left = tree.budget_left
        self._more: dict[int, Node] = {}
        self._tallies: dict[int, Tally] = {}
        self.branches: Mapping[int, BranchView] = {
            number: branch if branch.ended else self._tell(branch) for number, branch in tree.branches.items()
        }

    def _tell(self, branch: Branch) -> Told:
        tree, nodes = self._tree, list(branch.nodes)
        tip = tree.tip(branch)
        while tip.turn.status is TurnStatus.OPEN or not nodes:
            offset = len(nodes)
            turn = self._world.sample(turn_seed(branch.seed, offset), tip.turn.snapshot, self._version)
            tip = Node(
                index=tree.next_node + len(self._more), parent=tip.index, lease=branch.number, offset=offset,
                depth=tip.depth + 1, turn=turn,
            )  # fmt: skip
            self._more[tip.index] = tip
            nodes.append(tip.index)
        reward = tip.turn.reward
        place = tip.index
        while True:
            self._tallies[place] = self._tallies.get(place, tree.tally(place)).plus(reward)
            if place == ROOT:
                break
            place = self.node(place).parent
        outcome = Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)
        return Told(branch.number, branch.group, branch.anchor, nodes, outcome)

    def node(self, index: int) -> Node:
        return self._more[index] if index in self._more else self._tree.node(index)

    def anchors(self) -> list[int]:
        owned = [index for branch in self.branches.values() for index in branch.nodes]
        return [ROOT, *(i for i in owned if self.node(i).turn.status is TurnStatus.OPEN)]

    def in_flight(self, index: int) -> int:
        return 0

    def tally(self, index: int) -> Tally:
        return self._tallies.get(index, self._tree.tallies.get(index, EMPTY))

    def predict(self, index: int) -> Prediction:
        return self._tree.predictor.predict(self._prefix(index))

    def _prefix(self, index: int) -> Prefix:
        known, below = self.tally(ROOT), self.tally(index)
        if index in self._more:
            return describe(self._more[index], known, below)
        return self._tree.prefix_after(index, known, below)

    def draws(self) -> Draws:
        return self._tree.draws()


class Agreement:
    """Looks on while the forest decides (`allocator.watch.Watch`), and asks the rule again, with foresight.

    Args:
        every: one decision in so many is looked at; which ones depends on tree and decision only.
    """

    def __init__(self, rule: Rule, world: PopulationWorld, every: int) -> None:
        self.rule, self.world, self.every = rule, world, every
        self.version = Version(0, 0)
        self.asked = 0
        """Speculative picks that were looked at."""
        self.agreed = 0
        """Those among them that the synchronous search would have made."""
        self.safe = 0
        """Picks looked at that were made with nothing outstanding: the synchronous search makes the same."""

    def admitted(self, prompt: Prompt) -> None:
        """Not looked at."""

    def allowed(self, allowances: Mapping[int, int]) -> None:
        """Not looked at."""

    def deciding(self, tree: GrowingTree, decision: Decision) -> None:
        """Compare the picks with those that the synchronous search would have made here."""
        if not decision.picks or derive_seed("look", tree.id, tree.decisions) % self.every:
            return
        if tree.outstanding == 0:
            self.safe += len(decision.picks)
            return
        left = [pick.anchor for pick in self.rule.decide(Foresight(tree, self.world, self.version)).picks]
        self.asked += len(decision.picks)
        for pick in decision.picks:
            if pick.anchor in left:
                left.remove(pick.anchor)
                self.agreed += 1

    @property
    def share(self) -> float:
        """Of all picks looked at; 1 with D = 0."""
        looked = self.asked + self.safe
        return (self.agreed + self.safe) / looked if looked else 1.0
