"""`igrpo`: a tree of fixed width, level by level; what goes on is drawn by information gain.

IGRPO (arXiv 2607.06223; e3trange/IGRPO), a level being one turn:

    S(node)  how likely the right answer is by now, in [0, 1]; S(root) = 0
    IG = S − S(parent),  val = (S + IG) / 2
    G expansions are drawn one after the other among the active nodes, p ∝ softmax(γ · val), none more than
    `cap` times. Drawn once = the path goes on; drawn twice = two heirs of half its weight; never drawn = it
    is a leaf, paid `pseudo_scale` · S during the first `stable_steps` updates and 1 · S afterwards.

Published constants, the defaults here: G = 5 (`allocator.budget.continuations`), γ = 1, cap 2, scale 0.5 for
150 updates. A path that the environment ends keeps the environment's outcome. The pseudo-reward is a guess
made from S: where S comes from the policy itself it drifts upward with it, and no such ending teaches the
success predictor.

The paper's S is exp(mean log-probability of the gold answer) under the current policy. Where a node carries
a `BranchScore` with the source `gold_probability`, that is S. FrozenLake has no gold answer: there, and
wherever a node has no such score, S is the environment's process score of the turn.

Reconstruction, where paper and code leave room:

* the first level are G continuations from the prompt, which no cap holds back;
* every level draws G expansions (the code's mode `full`), or cap · active where that is less; G does not
  shrink when paths end;
* the training step that `stable_steps` counts is the wave, the update a tree is grown for;
* a node without any score has the S of its parent: it brought no information;
* after `max_levels` nothing is drawn any more and each active path runs to its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from allocator.rules.base import (
    COMPLETE,
    WAIT,
    BranchView,
    Decision,
    Draws,
    EventKind,
    Pick,
    Rule,
    Scored,
    Stop,
    TreeView,
)
from allocator.rules.paths import active_paths, from_the_prompt, on_the_way, tip
from common.config_allocator import IgrpoRuleConfig
from common.nouns import ROOT, Node, RewardSource

GOLD = "gold_probability"
"""Source of a `BranchScore` that is exp(mean log p(gold answer)) after the node."""
TO_THE_END = 0
ONE_TURN = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """An active path and what it is drawn by."""

    path: BranchView
    score: float
    """S"""
    gain: float
    """IG"""

    @property
    def value(self) -> float:
        return (self.score + self.gain) / 2.0


class IgrpoRule(Rule):
    """See the module. A level reads the scores of its turns and of those before, and which paths are over.

    It waits for the whole level whatever the score staleness D: a softmax over half a level would be another
    rule.
    """

    name = "igrpo"
    reads = frozenset({EventKind.NODE, EventKind.SCORE, EventKind.OUTCOME})
    requires = frozenset({"process_scores"})

    def __init__(self, config: IgrpoRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left > 0:
            # One group a start: what an adaptive budget adds later has a width of its own.
            group = max((branch.group for branch in view.branches.values()), default=-1) + 1
            return Decision((Pick(ROOT, group, ONE_TURN),) * view.budget_left)
        if on_the_way(view):
            return WAIT
        active = active_paths(view)
        if not active:
            return COMPLETE
        if self._is_last_level(view, active):
            return Decision(tuple(self._heir(path, TO_THE_END) for path in active))
        return self._level(view, active)

    def explain(self, view: TreeView) -> list[Scored]:
        """The active paths of a level, most likely to be drawn first, by their chance at its first draw."""
        active = active_paths(view)
        if view.budget_left > 0 or on_the_way(view) or not active or self._is_last_level(view, active):
            return []
        candidates = [candidate(view, path) for path in active]
        chances = softmax([self.config.gamma * c.value for c in candidates])
        drawn = self._draw(view, candidates)
        found = [
            Scored(tip(c.path), chance, {"score": c.score, "gain": c.gain, "value": c.value, "heirs": heirs})
            for c, chance, heirs in zip(candidates, chances, drawn, strict=True)
        ]
        return sorted(found, key=lambda scored: -scored.total)

    def _is_last_level(self, view: TreeView, active: Sequence[BranchView]) -> bool:
        return max(view.node(tip(path)).depth for path in active) >= self.config.max_levels

    def _level(self, view: TreeView, active: Sequence[BranchView]) -> Decision:
        config = self.config
        scale = config.pseudo_scale if view.wave < config.stable_steps else 1.0
        candidates = [candidate(view, path) for path in active]
        picks, stops = list[Pick](), list[Stop]()
        for each, heirs in zip(candidates, self._draw(view, candidates), strict=True):
            picks += [self._heir(each.path, ONE_TURN)] * heirs
            if not heirs:
                stops.append(Stop(each.path.number, scale * each.score, RewardSource.PSEUDO_REWARD))
        return Decision(tuple(picks), tuple(stops))

    def _draw(self, view: TreeView, candidates: Sequence[Candidate]) -> list[int]:
        """Heirs of each candidate."""
        logits = [self.config.gamma * each.value for each in candidates]
        width = from_the_prompt(view, candidates[0].path.group)
        return draw(logits, width, self.config.cap, view.draws())

    def _heir(self, path: BranchView, horizon: int) -> Pick:
        return Pick(tip(path), path.group, horizon, heir_of=path.number)


def candidate(view: TreeView, path: BranchView) -> Candidate:
    node = view.node(tip(path))
    score = score_at(view, node)
    return Candidate(path, score, score - score_at(view, view.node(node.parent)))


def score_at(view: TreeView, node: Node) -> float:
    """S of a node: 0 at the root, the nearest scored turn before it where it has none itself."""
    while node.index != ROOT:
        gold = [score.value for score in node.scores if score.source == GOLD]
        score = gold[-1] if gold else node.turn.process_score
        if score is not None:
            return score
        node = view.node(node.parent)
    return 0.0


def softmax(logits: Sequence[float]) -> list[float]:
    """[n] to [n], summing to 1."""
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def draw(logits: Sequence[float], width: int, cap: int, draws: Draws) -> list[int]:
    """How often each of n is drawn, `[n]`: `width` draws in all, or cap · n where that is less.

    Each draw is softmax over those below the cap, scaled anew: one whose weight is tiny beside a node that
    has reached the cap would otherwise be lost to underflow.
    """
    drawn = [0] * len(logits)
    for _ in range(min(width, cap * len(logits))):
        below = [place for place, times in enumerate(drawn) if times < cap]
        chosen = draws.weighted(softmax([logits[place] for place in below]))
        drawn[below[chosen]] += 1
    return drawn
