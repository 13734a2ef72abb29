"""A world small enough to enumerate: every action, every draw of a rule, with exact values.

    Chooser ──▶ grow (real Forest, rule, budget, predictor) ──▶ finished tree      one for each way it can go
       ▲                                                             │
       └────────── next combination of choices ◀─────────────────────┘            probabilities sum to 1

A prefix is the tuple of actions taken. The policy is a fixed table; values are computed by recursion, apart
from anything that the trees say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from allocator.budgets.base import Budget
from allocator.forest import Forest
from allocator.rules.base import Draws, Rule
from allocator.settings import Settings
from allocator.tree import Branch, GrowingTree
from common.nouns import (
    Ending,
    Outcome,
    RewardSource,
    TaskId,
    Tree,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)
from common.predictor import Predictor

T = TypeVar("T")
History = tuple[int, ...]
NOW = Version(0, 0)
PROMPT = 9
"""Token of the prompt, and of every observation; actions are tokens 0, 1, …"""


# ------------------------------------------------------------------------------------------- enumeration


class Chooser(Draws):
    """Makes the choices of one run of a process: those of `path` first, then always the first possible."""

    def __init__(self, path: Sequence[int]) -> None:
        self._forced = list(path)
        self.probability = 1.0
        self.made: list[tuple[int, list[float]]] = []

    def choose(self, probabilities: Sequence[float]) -> int:
        at = len(self.made)
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        chosen = self._forced[at] if at < len(self._forced) else possible[0]
        self.made.append((chosen, list(probabilities)))
        self.probability *= probabilities[chosen]
        return chosen

    def index(self, count: int) -> int:
        return self.choose([1.0 / count] * count)

    def weighted(self, weights: Sequence[float]) -> int:
        total = math.fsum(weights)
        return self.choose([weight / total for weight in weights])

    def next_path(self) -> list[int] | None:
        """Choices that lead to the next run; None after the last one."""
        path = list(self.made)
        while path:
            chosen, probabilities = path.pop()
            later = [i for i in range(chosen + 1, len(probabilities)) if probabilities[i] > 0]
            if later:
                return [made for made, _ in path] + [later[0]]
        return None


def enumerate_all(process: Callable[[Chooser], T]) -> Iterator[tuple[float, T]]:
    """Every way `process` can go, with its probability."""
    path: list[int] | None = []
    while path is not None:
        chooser = Chooser(path)
        result = process(chooser)
        yield chooser.probability, result
        path = chooser.next_path()


# ------------------------------------------------------------------------------------------------- world


@dataclass(frozen=True)
class World:
    """A tree of prefixes. `policy[h]` is the distribution over actions at an open prefix h; every prefix that
    is not in it is a leaf. `rewards[h]` is paid for the turn that ends at h (0 where it is missing)."""

    policy: Mapping[History, tuple[float, ...]]
    rewards: Mapping[History, float]

    def value(self, h: History) -> float:
        """Expected sum of the rewards after h."""
        return math.fsum(p * self.action_value(h, a) for a, p in enumerate(self.policy.get(h, ())))

    def action_value(self, h: History, action: int) -> float:
        """Expected sum of the rewards from taking `action` at h on."""
        following = (*h, action)
        return self.rewards.get(following, 0.0) + self.value(following)

    def score(self, h: History, action: int) -> tuple[float, ...]:
        """∇ log π(action | h) by the logits at h, `[actions]`."""
        return tuple((a == action) - p for a, p in enumerate(self.policy[h]))

    def gradient(self, h: History) -> list[float]:
        """∇V(h) by the logits at h, `[actions]`."""
        value = self.value(h)
        return [p * (self.action_value(h, a) - value) for a, p in enumerate(self.policy[h])]

    def entropy(self, h: History) -> float:
        return -math.fsum(p * math.log(p) for p in self.policy[h] if p > 0)

    def turn(self, h: History, action: int) -> Turn:
        """The turn that takes `action` at h, as an actor would report it."""
        following = (*h, action)
        is_open = following in self.policy
        return Turn(
            action=ids_to_bytes([action]),
            logprobs=floats_to_bytes([math.log(self.policy[h][action])]),
            entropies=floats_to_bytes([self.entropy(h)]),
            versions=[VersionRun(NOW, 1)],
            observation=ids_to_bytes([PROMPT]),
            action_text=str(action),
            status=TurnStatus.OPEN if is_open else TurnStatus.TERMINATED,
            reward=self.rewards.get(following, 0.0),
            process_score=min(1.0, max(0.0, self.value(following))) if is_open else None,
        )


def history(tree: GrowingTree | Tree, index: int) -> History:
    """The actions on the way to a node."""
    actions: list[int] = []
    while (node := tree.nodes[index]).parent >= 0:
        actions.append(int.from_bytes(node.turn.action[:4], "little"))
        index = node.parent
    return tuple(reversed(actions))


# ------------------------------------------------------------------------------------------------ growth


class EnumeratedTree(GrowingTree):
    """A tree whose rule draws from the chooser."""

    chooser: Chooser

    def draws(self) -> Draws:
        return self.chooser


class EnumeratedForest(Forest):
    """The real forest, with such a tree in it."""

    def __init__(self, settings: Settings, rule: Rule, budget: Budget, predictor: Predictor) -> None:
        super().__init__(settings, rule, budget, predictor)
        self.chooser: Chooser

    def plant(self, chooser: Chooser) -> GrowingTree:
        task = TaskId("tabular", "train", 0)
        tree = EnumeratedTree(0, task, 0, 0, NOW, self.predictor, self.settings.seed)
        tree.chooser = chooser
        self.trees = {0: tree}
        self.undecided = 1
        return tree


def grow(
    forest: EnumeratedForest, world: World, chooser: Chooser, *, lockstep: bool
) -> tuple[Tree, GrowingTree]:
    """Grow one tree to its end.

    Args:
        lockstep: all continuations take a turn each before the rule is asked again, whose picks then rest on
            half-grown branches; else each decision is run to its end.
    """
    tree = forest.plant(chooser)
    process_score = min(1.0, max(0.0, world.value(())))
    forest.root(tree, Turn(observation=ids_to_bytes([PROMPT]), process_score=process_score), None)
    running: list[Branch] = []
    while True:
        decision, branches = forest.decide(tree)
        running += branches
        if not running:
            if decision.complete:
                break
            if not decision.stops:
                raise RuntimeError(f"rule {forest.rule.name!r} waits though nothing is outstanding")
        while running:
            running = [branch for branch in running if not _step(forest, world, chooser, branch)]
            if lockstep and tree.budget_left > 0:
                break
    finished = forest.close(tree)
    if finished is None:
        raise RuntimeError("a tree without an outcome")
    return finished, tree


def _step(forest: Forest, world: World, chooser: Chooser, branch: Branch) -> bool:
    """One turn of a continuation; True when it has ended."""
    tree = branch.tree
    here = history(tree, tree.tip(branch).index)
    action = chooser.choose(world.policy[here])
    node = forest.expand(branch, world.turn(here, action), [])
    if node.turn.status is not TurnStatus.OPEN:
        said = Outcome(0.0, 0.0, RewardSource.ENVIRONMENT, Ending.TERMINATED)
        forest.end(branch, "finished", tree.earned(branch, said))
        return True
    if branch.horizon and len(branch.nodes) >= branch.horizon:
        forest.end(branch, "horizon", None)
        return True
    return False
