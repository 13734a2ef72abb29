"""Plain searches for the rules that go level by level: one path after the other, written from the papers.

They know nothing of the allocator, and live in the toy world of `levels`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from common.config_allocator import IgrpoRuleConfig, PatrRuleConfig
from common.nouns import NO_LEASE, Ending, Node, RewardSource, Tree, TurnStatus
from common.seeds import derive_seed, lease_seed
from tests.allocator.rules.levels import LevelConfig, Place, Step, breaks_at, step

START: Place = (NO_LEASE, 0)
"""The root."""


@dataclass
class Run:
    """One lease as the plain search ran it."""

    number: int
    anchor: Place
    heir_of: int
    weight: float
    baseline: float
    path: list[Step]
    """From the prompt to its end."""
    own: int
    """How many of them are its own."""
    ended: str = ""
    reward: float | None = None
    """Of its outcome."""
    source: RewardSource = RewardSource.ENVIRONMENT
    heirs: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    @property
    def earned(self) -> float:
        return sum(made.reward for made in self.path[len(self.path) - self.own :])


@dataclass
class Answer:
    """What a level says of one path."""

    heirs: int
    horizon: int
    reward: float = 0.0
    source: RewardSource = RewardSource.PRUNE_RULE


@dataclass
class LevelSearch:
    """One tree after the other, level after level, path after path."""

    config: LevelConfig
    continuations: int
    seed: int
    value: Callable[[int], float] = lambda depth: 0.5
    faults: bool = False

    def tree(self, number: int, wave: int) -> list[Run]:
        horizon = self.config.interval if isinstance(self.config, PatrRuleConfig) else 1
        runs: list[Run] = []
        for _ in range(self.continuations):
            self.run(number, runs, None, 1 / self.continuations, horizon)
        decision = 1
        while active := [run for run in runs if run.ended == "horizon" and not run.heirs]:
            answers = self.level(number, wave, decision, active)
            for run, answer in zip(active, answers, strict=True):
                if answer.heirs == 0:
                    run.ended, run.reward, run.source = "stopped", run.earned + answer.reward, answer.source
                for _ in range(answer.heirs):
                    run.heirs.append(len(runs))
                    self.run(number, runs, run, run.weight / answer.heirs, answer.horizon)
            decision += any(answer.heirs for answer in answers)
        return runs

    def run(self, tree: int, runs: list[Run], parent: Run | None, weight: float, horizon: int) -> None:
        seed, path = lease_seed(self.seed, tree, len(runs)), list(parent.path) if parent else []
        anchor = (parent.number, parent.own - 1) if parent else START
        heir_of = parent.number if parent else NO_LEASE
        run = Run(len(runs), anchor, heir_of, weight, self.value(len(path)), path, 0)
        runs.append(run)
        while not run.ended:
            if self.faults and breaks_at(seed) == run.own:
                run.ended = "dropped: broken"
                return
            path.append(step(seed, run.own))
            run.own += 1
            run.values.append(None if path[-1].last else self.value(len(path)))
            if path[-1].last:
                run.ended, run.reward = "finished", run.earned
            elif run.own == horizon and not (self.faults and breaks_at(seed) == run.own):
                run.ended = "horizon"

    def level(self, tree: int, wave: int, decision: int, active: list[Run]) -> list[Answer]:
        if isinstance(self.config, PatrRuleConfig):
            return self.scoring_point(self.config, active)
        draws = random.Random(derive_seed("rule", self.seed, tree, decision))
        return self.expansion(self.config, wave, draws, active)

    def scoring_point(self, config: PatrRuleConfig, active: list[Run]) -> list[Answer]:
        """PATR §3."""
        scores = [run.path[-1].score for run in active]
        low, n = sorted(scores), len(scores)
        median = low[n // 2] if n % 2 else (low[n // 2 - 1] + low[n // 2]) / 2
        alive = []
        for place, run in enumerate(active):
            newest = [made.action for made in run.path][-config.repeats :]
            repeated = len(newest) == config.repeats and len(set(newest)) == 1
            if not repeated and scores[place] >= median - config.margin:
                alive.append(place)
        split: list[int] = []
        while len(split) < config.top_k and len(split) < len(alive):
            split.append(max((p for p in alive if p not in split), key=lambda p: (scores[p], -p)))
        heirs = [config.children if p in split else int(p in alive) for p in range(n)]
        return [Answer(count, config.interval) for count in heirs]

    def expansion(
        self, config: IgrpoRuleConfig, wave: int, draws: random.Random, active: list[Run]
    ) -> list[Answer]:
        """IGRPO."""
        depth = len(active[0].path)
        if depth >= config.max_levels:
            return [Answer(1, 0) for _ in active]
        before = [run.path[-2].score if depth > 1 else 0.0 for run in active]
        scores = [run.path[-1].score for run in active]
        values = [(s + (s - b)) / 2 for s, b in zip(scores, before, strict=True)]
        drawn = [0] * len(active)
        for _ in range(min(self.continuations, config.cap * len(active))):
            terms = [
                math.exp(config.gamma * v) * (d < config.cap) for v, d in zip(values, drawn, strict=True)
            ]
            point, chosen = draws.random() * sum(terms), 0
            while point >= sum(terms[: chosen + 1]):
                chosen += 1
            drawn[chosen] += 1
        scale = config.pseudo_scale if wave < config.stable_steps else 1.0
        return [
            Answer(d, 1, scale * s, RewardSource.PSEUDO_REWARD) for d, s in zip(drawn, scores, strict=True)
        ]


@dataclass
class LevelRun:
    """All trees of a run, wave after wave; what a wave teaches is known from the next one on."""

    config: LevelConfig
    continuations: int
    seed: int
    wins: list[float] = field(default_factory=lambda: [1.0] * 40)
    losses: list[float] = field(default_factory=lambda: [1.0] * 40)

    def trees(self, waves: int, batch: int) -> list[list[Run]]:
        grown = []
        for wave in range(waves):
            search = LevelSearch(self.config, self.continuations, self.seed, self.value)
            new = [search.tree(number, wave) for number in range(wave * batch, (wave + 1) * batch)]
            self.learn(new)
            grown += new
        return grown

    def value(self, depth: int) -> float:
        bucket = depth.bit_length()
        return self.wins[bucket] / (self.wins[bucket] + self.losses[bucket])

    def learn(self, batch: list[list[Run]]) -> None:
        """One target a lease, at its anchor and at the open turns it sampled, where the world said all of its
        return."""
        self.wins = [0.9 * w + 0.1 for w in self.wins]
        self.losses = [0.9 * w + 0.1 for w in self.losses]
        for runs in batch:
            for run in runs:
                said = return_by_the_world(runs, run)
                if said is not None:
                    won = min(1.0, max(0.0, said))
                    first = len(run.path) - run.own
                    for depth in range(first, first + run.own + (not run.path[-1].last)):
                        self.wins[depth.bit_length()] += won
                        self.losses[depth.bit_length()] += 1 - won


def return_by_the_world(runs: list[Run], run: Run) -> float | None:
    """What a lease earned and the mean of what its heirs did; None where a rule put in a word."""
    if run.ended == "finished":
        return run.reward
    if not run.heirs:
        return None
    heirs = [return_by_the_world(runs, runs[number]) for number in run.heirs]
    known = [heir for heir in heirs if heir is not None]
    return run.earned + sum(known) / len(known) if len(known) == len(heirs) else None


def assert_same(tree: Tree, runs: list[Run]) -> None:
    """Leases, heirs, weights, baselines, values, turns, endings and outcomes, all of them."""
    places = [(node.lease, node.offset) for node in tree.nodes]
    assert len(tree.continuations) == len(runs)
    for c, run in zip(tree.continuations, runs, strict=True):
        terms = (run.number, run.anchor, run.heir_of, run.ended)
        assert (c.number, places[c.anchor], c.heir_of, c.ended) == terms, f"tree {tree.id}"
        assert abs(c.weight - run.weight) < 1e-12 and not c.speculative
        assert c.baseline is not None and abs(c.baseline - run.baseline) < 1e-12
        assert [places[index] for index in c.nodes] == [(run.number, k) for k in range(run.own)]
        for made, value, index in zip(run.path[len(run.path) - run.own :], run.values, c.nodes, strict=True):
            node = tree.nodes[index]
            turn = node.turn
            found = Step(turn.action_text, turn.process_score or 0.0, turn.reward, not is_open(node))
            assert found == made
            assert node.value == value or (value is not None and abs((node.value or 0.0) - value) < 1e-12)
        if run.reward is None:
            assert c.outcome is None
        else:
            assert c.outcome is not None and c.outcome.source is run.source
            assert (c.outcome.reward, c.outcome.raw_reward) == (run.reward, run.earned)
            assert (c.outcome.ending is Ending.PRUNED) == (run.ended == "stopped")


def is_open(node: Node) -> bool:
    return node.turn.status is TurnStatus.OPEN
