"""What catches a bug in the core: each check passes on the real one, and fails on those of `test_planted_bugs`.

The audit after every event of a faulty fleet, the dict model of `test_machine` fed with its records, the
plain sequential search, ages counted independently, and what the predictor is taught, by enumeration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from allocator.budgets import make_budget
from allocator.core import Handled
from allocator.rules.base import COMPLETE, Decision, EventKind, Pick, Rule, TreeView
from allocator.settings import Settings
from allocator.tree import Branch, BranchState
from benchmarks.fleet import Faults, Fleet, FleetConfig
from benchmarks.tabular import EnumeratedForest, World, enumerate_all, grow
from common.config_allocator import BudgetConfig, RandomRuleConfig
from common.messages import Expanded, Message, Starting
from common.predictor import HistoryPredictor
from tests.allocator.test_machine import Model
from tests.allocator.test_sequential import RULES, Crowd, PlainSearch, assert_equal

STALENESS = 3
"""D of the check that counts ages for itself."""
CHAOS = Faults(
    lost=0.02, duplicated=0.1, reordered=0.02, failed=0.05, declined=0.02, actor_life_s=25, actor_pause=0.01,
    learner_life_s=40, tree_stale=0.1,
)  # fmt: skip


class WatchedFleet(Fleet):
    """Reads every record with the model, and audits after every event."""

    def __init__(self, seed: int) -> None:
        settings = Settings(
            steps=4,
            batch_trees=3,
            max_policy_lag=1,
            max_score_staleness=3,
            lease_deadline_s=12,
            max_attempts=4,
        )
        fleet = FleetConfig(actors=4, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=CHAOS)
        super().__init__(settings, fleet, RandomRuleConfig(), BudgetConfig(continuations=6), seed)
        self.audit_every = 1
        self.model = Model()
        take = self.core.take_records

        def read() -> list[Any]:
            records = take()
            for kind, fields in records:
                self.model.read(kind, fields)
            return records

        self.core.take_records = read  # type: ignore[method-assign]


def fleet_check() -> None:
    for seed in range(3):
        result = WatchedFleet(seed).run(max_events=6000)
        assert result["ended"], "the run came to its end"
        assert result["stats"]["trees/committed"] == 12


def search_check() -> None:
    for config, name, continuations in RULES:
        for seed in range(2):
            grown = Crowd(config, continuations, seed, faults=0.15).grow()
            for tree, runs in zip(grown, PlainSearch(name, continuations).trees(), strict=True):
                assert_equal(tree, runs)


class AgedFleet(Fleet):
    """Counts for itself what a decision has not seen when its branches start: turns of other decisions since."""

    def __init__(self, seed: int) -> None:
        settings = Settings(steps=3, batch_trees=2, max_policy_lag=1, max_score_staleness=STALENESS)
        fleet = FleetConfig(actors=4, slots=4, latency_s=0.2)
        rule = RandomRuleConfig(chains=1, expansions=1)
        super().__init__(settings, fleet, rule, BudgetConfig(continuations=8), seed)
        self.turns: dict[int, list[int]] = {}
        self.born: dict[tuple[int, int], int] = {}
        self.oldest = 0

    def deliver(self, key: str, message: Message) -> Handled:
        branch = self.started(message)
        handled = super().deliver(key, message)
        if branch is not None and branch.state is BranchState.RUNNING:
            others = [d for d in self.turns[branch.tree.id][self.born[branch.tree.id, branch.number] :]]
            out = [b for b in branch.tree.branches.values() if b.state is not BranchState.ENDED]
            unseen = sum(d != branch.decision for d in others) + sum(
                b.decision != branch.decision for b in out
            )
            self.oldest = max(self.oldest, unseen)
        if isinstance(message, Expanded) and message.lease.tree in self.core.state.forest.trees:
            tree = self.core.state.forest.trees[message.lease.tree]
            self.turns.setdefault(tree.id, [])
            known = len(self.turns[tree.id])
            owners = [tree.nodes[i].lease for i in range(known + 1, tree.next_node)]
            self.turns[tree.id] += [tree.branches[owner].decision for owner in owners]
        for tree in self.core.state.forest.trees.values():
            for number in tree.branches:
                self.born.setdefault((tree.id, number), len(self.turns.setdefault(tree.id, [])))
        return handled

    def started(self, message: Message) -> Branch | None:
        """The branch that `Starting` is about, if it starts for the first time."""
        tree = self.core.state.forest.trees.get(message.lease.tree) if isinstance(message, Starting) else None
        branch = tree.branches.get(message.lease.number) if tree is not None else None  # type: ignore[union-attr]
        return branch if branch is not None and not branch.checked else None


def aging_check() -> None:
    """No branch starts on scores that have not seen more than D turns, and some come close."""
    oldest = 0
    for seed in range(4):
        fleet = AgedFleet(seed)
        assert fleet.run(max_events=6000)["ended"]
        oldest = max(oldest, fleet.oldest)
    assert 0 < oldest <= STALENESS


class AgainAfterSuccess(Rule):
    """One continuation; another one from the prompt only if it succeeded. The trap of averaging children."""

    name = "again"
    reads = frozenset({EventKind.OUTCOME})

    def decide(self, view: TreeView) -> Decision:
        if not view.branches:
            return Decision(picks=(Pick(0),))
        first = view.branches[0]
        won = first.outcome is not None and first.outcome.reward > 0
        return Decision(picks=(Pick(0),)) if won and len(view.branches) < 2 else COMPLETE


def teaching_check() -> None:
    """What the predictor is taught about a prompt is its value, though the rule looked at outcomes."""
    coin = World(policy={(): (0.5, 0.5)}, rewards={(1,): 1.0})
    forest = EnumeratedForest(
        Settings(), AgainAfterSuccess(), make_budget(BudgetConfig(continuations=2)), HistoryPredictor()
    )
    outcome = terms = 0.0
    for probability, (_, tree) in enumerate_all(lambda chooser: grow(forest, coin, chooser, lockstep=False)):
        targets, _ = tree.targets()
        outcome += probability * sum(target.outcome for target in targets)
        terms += probability * len(targets)
    assert outcome / terms == pytest.approx(coin.value(()))


CHECKS: dict[str, Callable[[], None]] = {
    "fleet": fleet_check,
    "search": search_check,
    "aging": aging_check,
    "teaching": teaching_check,
}
