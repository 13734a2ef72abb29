"""What is told of a running continuation is what comes of it, and the synchronous search agrees with itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from allocator.budgets.base import Prompt
from allocator.rules.base import Decision
from allocator.tree import GrowingTree
from benchmarks.fleet_population import PopulationWorld
from benchmarks.foresight import Agreement, Foresight
from benchmarks.speculation_arms import PREDICTOR, Cell, Watched
from common.messages import Message, TreeReady
from common.nouns import ROOT, Tree, Version
from common.predictors import make_predictor

CELL = Cell(slots=8, ratio=0.25, tail=True, continuations=12)


class Teller:
    """Writes down what foresight tells at each decision."""

    def __init__(self, world: PopulationWorld) -> None:
        self.world = world
        self.told: list[tuple[int, int, list[tuple[int, int]], float]] = []
        self.tallies: list[tuple[int, float, int]] = []

    def admitted(self, prompt: Prompt) -> None: ...

    def allowed(self, allowances: Mapping[int, int]) -> None: ...

    def deciding(self, tree: GrowingTree, decision: Decision) -> None:
        view = Foresight(tree, self.world, Version(0, 0))
        assert view.in_flight(ROOT) == 0 and view.anchors()[0] == ROOT
        assert all(branch.ended for branch in view.branches.values())
        for number, branch in tree.branches.items():
            if not branch.ended:
                seen = view.branches[number]
                places = [(view.node(i).lease, view.node(i).offset) for i in seen.nodes]
                assert seen.outcome is not None
                self.told.append((tree.id, number, places, seen.outcome.raw_reward))
        whole = view.tally(ROOT)
        self.tallies.append((tree.id, whole.wins, whole.trials))


class Kept(Watched):
    """Keeps whole trees."""

    kept: dict[int, Tree]

    def arrived(self, peer: str, message: Message) -> None:
        super().arrived(peer, message)
        if isinstance(message, TreeReady):
            self.kept[message.tree.id] = message.tree


def fleet(staleness: int, rule: str = "uucb", cell: Cell = CELL) -> Kept:
    made = Kept.of(cell, rule, staleness, 0, make_predictor(PREDICTOR))
    assert isinstance(made, Kept)
    made.kept = {}
    return made


def test_what_is_told_of_a_running_continuation_is_what_comes_of_it() -> None:
    simulation = fleet(24)
    assert isinstance(simulation.world, PopulationWorld)
    teller = Teller(simulation.world)
    simulation.core.state.forest.watch = teller
    simulation.run(until=lambda: len(simulation.kept) >= 12)
    looked = 0
    for number, lease, places, reward in teller.told:
        if number in simulation.kept:
            tree = simulation.kept[number]
            (branch,) = [c for c in tree.continuations if c.number == lease]
            assert branch.outcome is not None and branch.outcome.raw_reward == reward
            assert [(tree.nodes[i].lease, tree.nodes[i].offset) for i in branch.nodes] == places
            looked += 1
    assert looked > 100
    for number, wins, trials in teller.tallies:
        if number in simulation.kept:
            first = simulation.kept[number].continuations[:trials]
            assert wins == sum(c.outcome.raw_reward for c in first if c.outcome is not None)


@pytest.mark.parametrize("rule", ["uucb", "trace", "random"])
def test_the_synchronous_search_agrees_with_itself(rule: str) -> None:
    agreement = agreed(rule, 0)
    assert agreement.asked == 0 and agreement.safe > 0 and agreement.share == 1.0


def test_a_speculative_search_sometimes_chooses_otherwise() -> None:
    agreement = agreed("uucb", 24)
    assert agreement.asked > agreement.safe
    assert 0 < agreement.share < 1


def agreed(rule: str, staleness: int) -> Agreement:
    cell = Cell(slots=8, ratio=0.25, tail=True, continuations=10)
    simulation: Any = fleet(staleness, rule, cell)
    forest = simulation.core.state.forest
    forest.watch = agreement = Agreement(forest.rule, simulation.world, 1)
    simulation.run(until=lambda: len(simulation.kept) >= 8)
    return agreement
