"""With D = 0 and K = 0 the allocator equals a plain sequential search, decision for decision.

The search below knows nothing of the allocator: it runs one continuation after the other, to its end, in one
process, and learns from a wave when the wave is over. The allocator grows many trees at once with several actors
that report in a random order, repeat themselves, fail, and die. Both live in the same toy world, where a turn
depends on the seed of its lease and its offset alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from allocator.budgets.base import Budget
from common.config_allocator import IgrpoRuleConfig, PatrRuleConfig, RandomRuleConfig, RuleConfig
from common.messages import Expanded, Failed, Finished, Heartbeat, Inspect, Inspected, Revoke, TreeReady
from common.nouns import Lease, LeaseId, Tree, TurnStatus, ids
from common.seeds import derive_seed, lease_seed, turn_seed
from tests.allocator.harness import LEARNER, ROOT, Rig, small, turn, win
from tests.allocator.rules.level_search import LevelRun, assert_same
from tests.allocator.rules.levels import next_message
from tests.allocator.rules.searches import ARPO, AT2PO, CONTRAST, TRACE, UUCB, Looking, told

STEPS, BATCH, SEED = 3, 4, 11
CHAINS, EXPANSIONS = 2, 2
Place = tuple[int, int]
"""(owner, offset) of a turn; (-1, 0) is the root."""
START: Place = (-1, 0)


# ------------------------------------------------------------------------------------------- the world


def length(seed: int) -> int:
    """Turns of a continuation."""
    return 1 + seed % 4


def reward(seed: int) -> float:
    return float(seed >> 7 & 1)


# ------------------------------------------------------------------------------------------ the search


@dataclass
class Run:
    """One continuation as the plain search ran it."""

    number: int
    anchor: Place
    chain: int
    seed: int
    baseline: float
    values: list[float | None] = field(default_factory=list)


class PlainSearch:
    """One tree after the other, one continuation after the other."""

    def __init__(self, rule: str, continuations: int) -> None:
        self.rule = rule
        self.continuations = continuations
        self.wins = [1.0] * 40
        self.losses = [1.0] * 40

    def value(self, depth: int) -> float:
        bucket = depth.bit_length()
        return self.wins[bucket] / (self.wins[bucket] + self.losses[bucket])

    def trees(self) -> list[list[Run]]:
        grown = []
        for wave in range(STEPS):
            batch = [self.tree(wave * BATCH + i) for i in range(BATCH)]
            self.learn(batch)
            grown += batch
        return grown

    def tree(self, number: int) -> list[Run]:
        runs: list[Run] = []
        if self.rule == "flat":
            for _ in range(self.continuations):
                self.run(number, runs, START, 0)
            return runs
        if self.rule != "random":
            return self.looking(number, runs)
        for chain in range(CHAINS):
            self.run(number, runs, START, chain)
        decision = 1
        while len(runs) < self.continuations:
            rng = random.Random(derive_seed("rule", SEED, number, decision))
            picks = []
            for chain in range(CHAINS):
                inner = [(r.number, k) for r in runs if r.chain == chain for k in range(length(r.seed) - 1)]
                picks += [(rng.choice([START, *sorted(inner)]), chain) for _ in range(EXPANSIONS)]
            for anchor, chain in picks:
                self.run(number, runs, anchor, chain)
            decision += 1
        return runs

    def looking(self, number: int, runs: list[Run]) -> list[Run]:
        search, decision = Looking(self.continuations, length, reward, self.value), 0
        while len(runs) < self.continuations:
            rng = random.Random(derive_seed("rule", SEED, number, decision))
            for anchor, label in search.next(self.rule, [*runs], rng)[: self.continuations - len(runs)]:
                self.run(number, runs, anchor, label)
            decision += 1
        return runs

    def run(self, tree: int, runs: list[Run], anchor: Place, chain: int) -> None:
        number = len(runs)
        seed = lease_seed(SEED, tree, number)
        depth = self.depth(runs, anchor)
        run = Run(number, anchor, chain, seed, self.value(depth))
        turns = length(seed)
        run.values = [self.value(depth + k + 1) if k < turns - 1 else None for k in range(turns)]
        runs.append(run)

    def depth(self, runs: list[Run], place: Place) -> int:
        return 0 if place == START else self.depth(runs, runs[place[0]].anchor) + place[1] + 1

    def learn(self, batch: list[list[Run]]) -> None:
        self.wins = [0.9 * w + 0.1 for w in self.wins]
        self.losses = [0.9 * w + 0.1 for w in self.losses]
        for runs in batch:
            for run in runs:
                depth = self.depth(runs, run.anchor)
                for d in range(depth, depth + length(run.seed)):
                    self.wins[d.bit_length()] += reward(run.seed)
                    self.losses[d.bit_length()] += 1 - reward(run.seed)


# --------------------------------------------------------------------------------------- the allocator


class Crowd:
    """Several actors of one core, moved in a random order."""

    def __init__(self, rule: RuleConfig, continuations: int | Budget, seed: int, faults: float) -> None:
        settings = small(steps=STEPS, batch_trees=BATCH, seed=SEED, max_attempts=10_000)
        self.rig = Rig(settings, rule, continuations)
        self.rig.check_law = False
        self.rng = random.Random(seed)
        self.faults = faults
        self.held: dict[str, list[Lease]] = {}
        self.progress: dict[LeaseId, int] = {}
        self.births = 0
        self.trees: dict[int, Tree] = {}

    def actor(self, name: str) -> None:
        self.births += 1
        key = f"{name}/{self.births}"
        self.held = {k: v for k, v in self.held.items() if not k.startswith(f"{name}/")}
        self.held[self.rig.actor(key, slots=3, prefetch=2)] = []

    def grow(self) -> list[Tree]:
        for name in "abc":
            self.actor(name)
        self.rig.learner()
        step = 0
        for _ in range(40_000):
            if len(self.trees) == STEPS * BATCH:
                break
            self.move()
            new = [m.tree for m in self.rig.take(LEARNER, TreeReady)]
            self.trees.update({tree.id: tree for tree in new})
            if len(self.trees) == (step + 1) * BATCH:
                step += 1
                self.rig.consume(sorted(self.trees)[-BATCH:], step)
        assert self.rig.core.audit() == []
        assert len(self.trees) == STEPS * BATCH, self.rig.core.stats()
        return [self.trees[i] for i in sorted(self.trees)]

    def move(self) -> None:
        """One random thing happens."""
        self.rig.tick(0.01)
        self.rig.say(LEARNER, Heartbeat(0, 0))
        key = self.rng.choice(sorted(self.held))
        for message in self.rig.take(key, Inspect):
            self.rig.say(key, Inspected(message.tree, message.task, ROOT))
        self.held[key] += self.rig.leases(key)
        for revoke in self.rig.take(key, Revoke):
            self.held[key] = [lease for lease in self.held[key] if lease.id != revoke.lease]
            self.rig.say(key, Failed(revoke.lease, "revoked", False))
        if self.rng.random() < self.faults / 10:
            self.actor(key.partition("/")[0])
        elif self.held[key]:
            self.advance(key, self.rng.choice(self.held[key]))

    def advance(self, key: str, lease: Lease) -> None:
        """The lease gets on by one message, sometimes said twice, sometimes a failure."""
        rig, state = self.rig, self.progress.get(lease.id, -1)
        if state == -1 and lease.offset < length(lease.seed):
            rig.start(key, lease)
            self.progress[lease.id] = lease.offset
        elif state != -1 and self.rng.random() < self.faults:
            rig.say(key, Failed(lease.id, "drill", True))
            self.held[key].remove(lease)
        elif state == -1 or state == length(lease.seed):
            rig.say(key, Finished(lease.id, length(lease.seed), win(reward(lease.seed))))
            self.held[key].remove(lease)
        else:
            for _ in range(1 + (self.rng.random() < self.faults)):
                last = state == length(lease.seed) - 1
                plain = turn(lease, state, last, reward=reward(lease.seed) * last)
                rig.say(key, Expanded(lease.id, state, told(lease.seed, state, plain)))
            self.progress[lease.id] = state + 1


def assert_equal(tree: Tree, runs: list[Run]) -> None:
    """Anchors, seeds, weights, baselines, turns, values and outcomes, all of them."""
    places = [(node.lease, node.offset) for node in tree.nodes]
    assert len(tree.continuations) == len(runs)
    for c, run in zip(tree.continuations, runs, strict=True):
        assert (c.number, places[c.anchor]) == (run.number, run.anchor), f"tree {tree.id}"
        assert c.weight == 1 / len(runs) and c.baseline == pytest.approx(run.baseline, abs=1e-12)
        assert not c.speculative
        nodes = [tree.nodes[i] for i in c.nodes]
        assert [n.turn.seed for n in nodes] == [turn_seed(run.seed, k) for k in range(length(run.seed))]
        assert [n.value for n in nodes] == [
            v if v is None else pytest.approx(v, abs=1e-12) for v in run.values
        ]
        assert c.outcome is not None and c.outcome.reward == reward(run.seed)
        assert all(a.parent == b for a, b in zip(nodes, [c.anchor, *c.nodes], strict=False))


class LevelCrowd(Crowd):
    """The same crowd in a world with scores, where a path may come back at its horizon."""

    def advance(self, key: str, lease: Lease) -> None:
        rig, state = self.rig, self.progress.get(lease.id, -1)
        message = next_message(lease, lease.offset if state == -1 else state)
        if state == -1 and isinstance(message, Expanded):
            rig.start(key, lease)
            self.progress[lease.id] = lease.offset
        elif state != -1 and self.rng.random() < self.faults:
            rig.say(key, Failed(lease.id, "drill", True))
            self.held[key].remove(lease)
        elif isinstance(message, Expanded):
            for _ in range(1 + (self.rng.random() < self.faults)):
                rig.say(key, message)
            self.progress[lease.id] = state + 1
        else:
            rig.say(key, message)
            self.held[key].remove(lease)


RULES = [(RuleConfig(), "flat", 6), (RandomRuleConfig(chains=CHAINS, expansions=EXPANSIONS), "random", 10)]
LOOKING = [
    (ARPO, "arpo", 10),
    (AT2PO, "at2po", 10),
    (TRACE, "trace", 9),
    (UUCB, "uucb", 7),
    (CONTRAST, "contrast", 7),
]
"""Rules that look at what came of earlier continuations."""
CASES = [
    (*rule, seed) for rules, seeds in ((RULES, 8), (LOOKING, 4)) for rule in rules for seed in range(seeds)
]


@pytest.mark.parametrize("config, name, continuations, seed", CASES, ids=[f"{c[1]}-{c[3]}" for c in CASES])
@pytest.mark.parametrize("faults", [0.0, 0.15], ids=["calm", "faulty"])
def test_many_trees_in_flight_equal_a_plain_sequential_search_decision_for_decision(
    config: RuleConfig, name: str, continuations: int, seed: int, faults: float
) -> None:
    grown = Crowd(config, continuations, seed, faults).grow()
    expected = PlainSearch(name, continuations).trees()
    for tree, runs in zip(grown, expected, strict=True):
        assert_equal(tree, runs)
        assert [t.turn.status for t in tree.nodes].count(TurnStatus.OPEN) == 1 + sum(
            length(run.seed) - 1 for run in runs
        )
        assert all(len(ids(node.turn.action)) == 1 for node in tree.nodes[1:])


LEVELS = [
    (PatrRuleConfig(interval=2, margin=0.25, repeats=3), 4),
    (IgrpoRuleConfig(gamma=4.0, stable_steps=2), 3),
]


@pytest.mark.parametrize("config, continuations", LEVELS, ids=["patr", "igrpo"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("faults", [0.0, 0.15], ids=["calm", "faulty"])
def test_trees_that_grow_level_by_level_equal_a_plain_search_too(
    config: PatrRuleConfig | IgrpoRuleConfig, continuations: int, seed: int, faults: float
) -> None:
    grown = LevelCrowd(config, continuations, seed, faults).grow()
    expected = LevelRun(config, continuations, SEED).trees(STEPS, BATCH)
    for tree, runs in zip(grown, expected, strict=True):
        assert_same(tree, runs)
    assert len({run.ended for runs in expected for run in runs}) == 3, "some paths are stopped"
    assert len({round(run.baseline, 6) for runs in expected for run in runs}) > 5


@pytest.mark.parametrize("_, name, continuations", [RULES[1], *LOOKING])
def test_the_toy_world_is_one_where_a_wrong_anchor_shows(
    _: RuleConfig, name: str, continuations: int
) -> None:
    """Otherwise the comparison above would prove nothing."""
    runs = [run for tree in PlainSearch(name, continuations).trees() for run in tree]
    assert len({run.anchor for run in runs}) > 8 and {run.anchor == START for run in runs} == {True, False}
    assert len({turn_seed(run.seed, 0) for run in runs}) == len(runs)
    assert len({round(run.baseline, 6) for run in runs}) > 5
