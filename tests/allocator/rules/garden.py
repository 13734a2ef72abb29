"""Trees grown by hand through the real forest, and small random worlds to grow them in.

A `Garden` is one open tree whose branches a test starts, expands and ends itself, in any order. What the predictor
says of a prefix is the process score that the test gave the turn (`Told`), so that a test can set every V.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from allocator.budgets.fixed import FixedBudget
from allocator.forest import Forest
from allocator.rules.base import Decision, Pick, Rule
from allocator.tree import Branch, GrowingTree
from common.nouns import (
    NO_LEASE,
    ROOT,
    Ending,
    Outcome,
    RewardSource,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)
from common.predictor import Prediction, Predictor, Target
from common.prefix import Prefix
from tests.allocator.harness import small

Place = tuple[int, int]
"""(owner, offset) of a turn; (-1, 0) is the prompt."""


class Told(Predictor):
    """Predicts the process score of a prefix; one half where it has none."""

    version = 0

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        return Prediction(0.5 if prefix.process_score is None else prefix.process_score, 0.1)

    def pin(self, version: int) -> None:
        return None

    def unpin(self, version: int) -> None:
        return None

    def update(self, targets: Sequence[Target]) -> int:
        return self.version

    def pinned(self) -> Counter[int]:
        return Counter()

    def stats(self) -> dict[str, float]:
        return {}

    def to_state(self) -> dict[str, Any]:
        return {}

    def from_state(self, state: dict[str, Any]) -> None:
        return None


class Hopeful(Told):
    """Told, and moved halfway to the mean of what came out below a prefix, and a little by the whole tree."""

    def predict(self, prefix: Prefix, version: int | None = None) -> Prediction:
        mean = super().predict(prefix).mean
        for tally, share in ((prefix.tree, 0.125), (prefix.below, 0.5)):
            if tally.trials:
                mean += share * (tally.wins / tally.trials - mean)
        return Prediction(mean, 0.1)


class Garden:
    """See the module."""

    def __init__(
        self, rule: Rule, allowance: int, success: float = 0.5, predictor: Predictor | None = None
    ) -> None:
        self.forest = Forest(small(), rule, FixedBudget(allowance), predictor or Told())
        self.tree: GrowingTree = self.forest.open(0, 0, 0, Version(0, 0))
        self.forest.root(self.tree, Turn(observation=b"\1\0\0\0", process_score=success), None)

    def decide(self) -> Decision:
        """What the rule says of the tree as it stands; nothing is started."""
        return self.forest.rule.decide(self.tree)

    def grow(self, *picks: Pick) -> list[Branch]:
        return self.forest._grow(self.tree, picks)

    def start(self, anchor: int = ROOT, group: int = 0) -> Branch:
        return self.grow(Pick(anchor, group))[0]

    def turn(
        self,
        branch: Branch,
        success: float | None = None,
        entropies: Sequence[float] = (),
        logprobs: Sequence[float] | None = None,
        last: bool = False,
    ) -> int:
        """One more turn; returns its node. Without `logprobs` it has two tokens of probability 1/e."""
        probabilities = [-1.0, -1.0] if logprobs is None else logprobs
        turn = Turn(
            action=ids_to_bytes([0] * len(probabilities)),
            logprobs=floats_to_bytes(probabilities),
            entropies=floats_to_bytes(entropies),
            versions=[VersionRun(Version(0, 0), len(probabilities))] if probabilities else [],
            status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
            process_score=success,
        )
        return self.forest.expand(branch, turn, []).index

    def end(self, branch: Branch, reward: float, source: RewardSource = RewardSource.ENVIRONMENT) -> None:
        self.forest.end(branch, "finished", Outcome(reward, reward, source, Ending.TERMINATED))

    def drop(self, branch: Branch) -> None:
        self.forest.end(branch, "dropped: broken", None)

    def path(self, successes: Sequence[float], reward: float | None, anchor: int = ROOT) -> list[int]:
        """A whole continuation: a turn that goes on for each of `successes`, and a last one. Without a reward
        it is dropped. Returns its nodes."""
        branch = self.start(anchor)
        nodes = [self.turn(branch, success) for success in successes] + [self.turn(branch, last=True)]
        if reward is None:
            self.drop(branch)
        else:
            self.end(branch, reward)
        return nodes

    def place(self, index: int) -> Place:
        node = self.tree.nodes[index]
        return (NO_LEASE, 0) if index == ROOT else (node.lease, node.offset)


class World:
    """What continuation `number` of a tree does, turn by turn, drawn from a seed."""

    def __init__(self, seed: int, dropped: float = 0.15, unscored: float = 0.1, longest: int = 4) -> None:
        self.seed, self.dropped, self.unscored, self.longest = seed, dropped, unscored, longest

    def _rng(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self.seed, *key))))

    def length(self, number: int) -> int:
        """Turns of its own; the last one ends the world."""
        return self._rng("length", number).randint(1, self.longest)

    def breaks_after(self, number: int) -> int | None:
        """Turns after which it is dropped, None where it is not."""
        rng = self._rng("breaks", number)
        return rng.randrange(self.length(number)) if rng.random() < self.dropped else None

    def reward(self, number: int) -> float:
        return float(self._rng("reward", number).random() < 0.5)

    def success(self, number: int, offset: int) -> float:
        return round(self._rng("success", number, offset).random(), 3)

    def entropies(self, number: int, offset: int) -> list[float]:
        """None given now and then, else one to thirty tokens, in eighths."""
        rng = self._rng("entropies", number, offset)
        count = 0 if rng.random() < self.unscored else rng.randint(1, 30)
        return [rng.randint(0, 40) / 8 for _ in range(count)]

    def logprobs(self, number: int, offset: int) -> list[float]:
        rng = self._rng("logprobs", number, offset)
        return [-rng.randint(0, 40) / 8 for _ in range(rng.randint(1, 5))]


def step(garden: Garden, world: World, branch: Branch) -> None:
    """The branch gets on by one message: a turn, its end, or the news that it is dropped."""
    number, offset = branch.number, len(branch.nodes)
    if offset == world.breaks_after(number):
        garden.drop(branch)
    elif offset == world.length(number):
        garden.end(branch, world.reward(number))
    else:
        garden.turn(
            branch, world.success(number, offset), world.entropies(number, offset),
            world.logprobs(number, offset), last=offset == world.length(number) - 1,
        )  # fmt: skip


def run_apart(garden: Garden, world: World) -> list[Decision]:
    """The synchronous search: each decision's continuations run to their ends before the next one."""
    decisions: list[Decision] = []
    while not (decision := garden.decide()).complete:
        assert decision.picks, "nothing is outstanding, so the rule must not wait"
        decisions.append(decision)
        for branch in garden.grow(*decision.picks):
            while not branch.ended:
                step(garden, world, branch)
    return decisions


def run_mixed(garden: Garden, world: World, seed: int, check: Callable[[Decision], None]) -> None:
    """The rule is asked at any time, and continuations get on in a random order."""
    rng = random.Random(seed)
    while True:
        running = [branch for branch in garden.tree.branches.values() if not branch.ended]
        decision = garden.decide() if rng.random() < 0.5 or not running else Decision()
        check(decision)
        assert decision.picks or running or decision.complete, "it waits though nothing is outstanding"
        if decision.picks:
            garden.grow(*decision.picks)
        elif running:
            step(garden, world, rng.choice(running))
        elif decision.complete:
            return


def without_entropies(garden: Garden) -> None:
    """Forget every entropy that was reported."""
    for index, node in garden.tree.nodes.items():
        bare = msgspec.structs.replace(node.turn, entropies=b"")
        garden.tree.nodes[index] = msgspec.structs.replace(node, turn=bare)
