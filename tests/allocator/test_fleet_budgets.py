"""Pools and rescues in whole runs: whatever fails, falls back or comes late, nobody waits for ever."""

from __future__ import annotations

import random
from typing import Any

import pytest

from allocator.budgets.adaptive import AdaptiveBudget
from allocator.budgets.base import Budget
from allocator.core import AllocatorCore
from allocator.rules import make_rule
from allocator.settings import Settings
from benchmarks.fleet import Fleet, FleetConfig, SimActor
from common.config_allocator import (
    AdaptiveConfig,
    BudgetConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
    TraceRuleConfig,
    UucbRuleConfig,
    root_cost,
)
from common.messages import Committed, Dropped, Failed, Inspect, Inspected, InspectFailed, TreeReady
from common.nouns import Lease, Version
from tests.allocator.budgets.test_trace_roots import Guessing
from tests.allocator.harness import ROOT, Rig, small
from tests.allocator.test_fleet import FAULTY

STEPS, BATCH = 5, 4


def pool(candidates: int, rule: RuleConfig, batch: int = BATCH) -> Budget:
    config = TraceRootsConfig(continuations=6, candidates=candidates)
    return Guessing(config, batch, root_cost(rule))


def rescues(batch: int = BATCH, overhead: float = 0.4, continuations: int = 6) -> Budget:
    return AdaptiveBudget(AdaptiveConfig(continuations=continuations, overhead=overhead, extra=2), batch)


def fleet(seed: int, rule: RuleConfig, budget: Budget, lag: int) -> Fleet:
    """Five updates of four trees by six actors."""
    settings = Settings(
        steps=STEPS, batch_trees=BATCH, max_policy_lag=lag, max_score_staleness=2, lease_deadline_s=12.0
    )
    shape = FleetConfig(actors=6, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=FAULTY)
    made = Fleet(settings, shape, rule, BudgetConfig(), seed)
    made.core = AllocatorCore(settings, make_rule(rule), budget)
    made.audit_every = 7
    return made


@pytest.fixture
def failing_inspections(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in five tasks cannot be set up at the first try, nor often at the second."""
    receive = SimActor.receive

    def sometimes(actor: SimActor, message: Any) -> None:
        if isinstance(message, Inspect) and actor.line.alive and actor.fleet.rng.random() < 0.2:
            actor.line.send(InspectFailed(message.tree, "drill"))
        else:
            receive(actor, message)

    monkeypatch.setattr(SimActor, "receive", sometimes)


def ran_to_its_end(simulation: Fleet) -> dict[str, float]:
    result = simulation.run(max_events=40_000)
    stats: dict[str, float] = result["stats"]
    assert result["ended"] and result["audit"] == [], f"{simulation.core.waiting()}: {stats}"
    assert stats["trees/committed"] == STEPS * BATCH
    assert stats["trees/opened"] == stats["trees/committed"] + stats["trees/dropped"]
    return stats


@pytest.mark.usefixtures("failing_inspections")
@pytest.mark.parametrize("rule", [RuleConfig(), TraceRuleConfig(per_root=1)], ids=["flat", "trace"])
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("candidates", [1, 2, 4])
def test_a_faulty_fleet_that_chooses_from_pools_comes_to_its_end(
    candidates: int, lag: int, rule: RuleConfig
) -> None:
    total: dict[str, float] = {}
    for seed in range(2):
        simulation = fleet(seed, rule, pool(candidates, rule), lag)
        for name, value in ran_to_its_end(simulation).items():
            total[name] = total.get(name, 0) + value
        assert simulation.core.state.delivery.pools == {}
    assert total.get("trees/dropped/not_selected", 0) == 2 * STEPS * BATCH * (candidates - 1)
    assert candidates > 1 or total["budget/largest"] > 2 * 6, "who has no choice of prompts shares unequally"


@pytest.mark.parametrize(
    "rule", [RuleConfig(), RandomRuleConfig(), UucbRuleConfig()], ids=["flat", "random", "uucb"]
)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.usefixtures("failing_inspections")
def test_a_faulty_fleet_that_rescues_trees_comes_to_its_end_within_its_cap(
    lag: int, rule: RuleConfig
) -> None:
    attempts = 0.0
    for seed in range(2):
        stats = ran_to_its_end(fleet(seed, rule, rescues(continuations=2 if rule.name == "flat" else 6), lag))
        assert stats["budget/extra"] <= 0.4 * stats["budget/regular"]
        attempts += stats["budget/attempts"]
    assert attempts > 0 or rule.name != "flat", "of two fair coins, half are alike"


# ----------------------------------------------------------------- a learner that loses its checkpoints


class Ordeal:
    """One actor and a learner, moved at random: tasks fail, continuations are dropped, trees are stale, and the
    learner falls back, now and then behind a checkpoint that it had announced."""

    def __init__(self, budget: Budget, seed: int, lag: int, batch: int, falls: int = 4) -> None:
        bounds = small(steps=4, batch_trees=batch, max_policy_lag=lag, max_attempts=2, connect_timeout_s=1e9)
        self.rig = Rig(bounds, continuations=budget)
        self.rng = random.Random(seed)
        self.batch, self.falls, self.lineage, self.step = batch, falls, 0, 0
        self.trained: dict[int, list[int]] = {}
        self.committed = 0
        self.queue: list[int] = []
        self.learner = self.rig.learner()
        self.actor = self.rig.actor(slots=self.rng.choice([1, 3, 40]))
        self.inspects: list[Inspect] = []
        self.leases: list[Lease] = []

    def run(self) -> None:
        idle = 0
        while self.committed < 4:
            idle = 0 if self.move() else idle + 1
            assert idle < 200, f"nothing happens any more: {self.rig.core.stats()}"

    def move(self) -> bool:
        self.collect()
        if self.falls and self.rng.random() < 0.03:
            self.fall_back()
            return True
        learns = self.rng.random() < 0.3
        return self.train() if learns else self.act()

    def collect(self) -> None:
        self.inspects += self.rig.take(self.actor, Inspect)
        self.leases += self.rig.leases(self.actor)
        for message in self.rig.take(self.learner, TreeReady):
            if self.rng.random() < 0.1:
                self.rig.say(self.learner, Dropped(message.tree.id, "stale"))
            else:
                self.queue.append(message.tree.id)

    def act(self) -> bool:
        if self.inspects:
            message = self.inspects.pop(self.rng.randrange(len(self.inspects)))
            fails = self.rng.random() < 0.3
            said = (
                InspectFailed(message.tree, "drill") if fails else Inspected(message.tree, message.task, ROOT)
            )
            self.rig.say(self.actor, said)
        elif self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            if self.rng.random() < 0.1:
                self.rig.start(self.actor, lease)
                self.rig.say(self.actor, Failed(lease.id, "drill", False))
            else:
                self.rig.finish(self.actor, lease, reward=float(lease.seed >> 9 & 1))
        else:
            self.rig.tick(0.1)
            return False
        return True

    def train(self) -> bool:
        if len(self.queue) < self.batch:
            return False
        trees, self.queue = self.queue[: self.batch], self.queue[self.batch :]
        self.step += 1
        self.trained[self.step] = trees
        self.rig.consume(trees, self.step, self.lineage, self.learner)
        if self.rng.random() < 0.5 or self.step == 4:
            saved = [tree for step in range(self.committed + 1, self.step + 1) for tree in self.trained[step]]
            self.rig.say(self.learner, Committed(Version(self.lineage, self.step), saved))
            self.committed = self.step
        return True

    def fall_back(self) -> None:
        """To the newest checkpoint, or behind it."""
        self.falls -= 1
        self.lineage += 1
        self.step = self.committed = max(0, self.committed - self.rng.choice([0, 0, 1, 2]))
        self.queue = []
        self.learner = self.rig.learner(
            step=self.step, lineage=self.lineage, incarnation=str(self.lineage + 1)
        )


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("candidates", [1, 3])
def test_a_learner_that_falls_back_in_the_middle_of_a_pool_gets_its_trees_all_the_same(
    candidates: int, lag: int
) -> None:
    lost = 0.0
    for seed in range(12):
        ordeal = Ordeal(Guessing(TraceRootsConfig(continuations=3, candidates=candidates), 3), seed, lag, 3)
        ordeal.run()
        lost += ordeal.rig.stat("trees/dropped/checkpoint_lost")
    assert lost > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_a_learner_that_falls_back_while_trees_are_parked_gets_its_trees_all_the_same(lag: int) -> None:
    lost = attempts = 0.0
    for seed in range(12):
        ordeal = Ordeal(rescues(3, 0.4, continuations=2), seed, lag, 3)
        ordeal.run()
        lost += ordeal.rig.stat("trees/dropped/checkpoint_lost")
        attempts += ordeal.rig.stat("budget/attempts")
    assert lost > 0 < attempts
