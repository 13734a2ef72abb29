"""`patr`: process scores at every K turns decide who is split and who is stopped.

PATR, Process-Scorer Guided Adaptive Tree Rollout (arXiv 2607.15610 §3):

    B0 fresh trajectories ──K turns──▶ scoring point ──K turns──▶ scoring point … until no path is active
                                         s < median − α, or one action Θ times in a row: stopped, a failure
                                         the k best of the others: M heirs each, of 1/M of the weight
                                         the rest: one heir, which is the same path going on

Published constants, the defaults here: B0 = 4 (`allocator.budget.continuations`), K = 5 on FrozenLake (13 on
software tasks), k = 2, M = 2, α = 0.5, Θ = 6. With scores in [0, 1] and α = 0.5 hardly any path is stopped.

Reconstruction, where the paper (no code was published) leaves room:

* a scoring point is reached when every active path has done its K turns, hence at the same depth K, 2K, …;
* the median is that of the active paths at this point (the mean of the two middle ones of an even number),
  those about to be stopped included; a path exactly at median − α goes on;
* "one action Θ times" looks at the newest Θ turns of the path: a path that left its loop goes on;
* of equal scores the path with the lower number comes first; with fewer than k left, all of them are split;
* a path that the environment could not score is neither stopped for its score nor split;
* what a stopped path is paid, beyond what its turns had earned, is 0.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from allocator.rules.base import (
    COMPLETE,
    WAIT,
    BranchView,
    Decision,
    EventKind,
    Pick,
    Rule,
    Scored,
    Stop,
    TreeView,
)
from allocator.rules.paths import active_paths, from_the_prompt, on_the_way, tip
from common.config_allocator import PatrRuleConfig
from common.nouns import ROOT

FAILURE = 0.0
"""Reward of a stopped path: it stays among the outcomes of its prompt as a negative."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scoring point says of one path."""

    path: BranchView
    score: float | None
    """Process score of its last turn; None where the environment gave none."""
    same: int
    """How often its last action was taken in a row."""
    heirs: int
    """0 = stopped."""


class PatrRule(Rule):
    """See the module. A scoring point reads turns (actions), their scores, and which paths are over.

    It waits for all of that whatever the score staleness D: a median of half a level would be another rule.
    """

    name = "patr"
    reads = frozenset({EventKind.NODE, EventKind.SCORE, EventKind.OUTCOME})
    requires = frozenset({"process_scores"})

    def __init__(self, config: PatrRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left > 0:
            return self._begin(view)
        if on_the_way(view):
            return WAIT
        verdicts = self._judge(view, active_paths(view))
        if not verdicts:
            return COMPLETE
        picks, stops = list[Pick](), list[Stop]()
        for verdict in verdicts:
            path = verdict.path
            heir = Pick(tip(path), path.group, self.config.interval, heir_of=path.number)
            picks += [heir] * verdict.heirs
            stops += [] if verdict.heirs else [Stop(path.number, FAILURE)]
        return Decision(tuple(picks), tuple(stops))

    def explain(self, view: TreeView) -> list[Scored]:
        """The active paths at a scoring point, best first; one without a score comes last, with total 0."""
        if view.budget_left > 0 or on_the_way(view):
            return []
        verdicts = self._judge(view, active_paths(view))
        known = [v.score for v in verdicts if v.score is not None]
        middle = {"median": statistics.median(known)} if known else {}
        ordered = sorted(verdicts, key=lambda v: (v.score is None, -(v.score or 0.0), v.path.number))
        return [
            Scored(tip(v.path), v.score or 0.0, {**middle, "same_action": v.same, "heirs": v.heirs})
            for v in ordered
        ]

    def _begin(self, view: TreeView) -> Decision:
        """Fresh trajectories for all the budget there is; a group is one of them with all its heirs."""
        first = from_the_prompt(view)
        groups = range(first, first + view.budget_left)
        return Decision(tuple(Pick(ROOT, group, self.config.interval) for group in groups))

    def _judge(self, view: TreeView, paths: list[BranchView]) -> list[Verdict]:
        """One verdict a path, in their order."""
        config = self.config
        scores = {path.number: view.node(tip(path)).turn.process_score for path in paths}
        same = {path.number: times_in_a_row(view, tip(path)) for path in paths}
        ranked = sorted((-score, number) for number, score in scores.items() if score is not None)
        bar = statistics.median(-score for score, _ in ranked) - config.margin if ranked else 0.0
        hopeless = {number for score, number in ranked if -score < bar}
        stopped = hopeless | {number for number, times in same.items() if times >= config.repeats}
        best = [number for _, number in ranked if number not in stopped][: config.top_k]
        return [
            Verdict(
                path,
                scores[path.number],
                same[path.number],
                0 if path.number in stopped else config.children if path.number in best else 1,
            )
            for path in paths
        ]


def times_in_a_row(view: TreeView, index: int) -> int:
    """How many turns up to a node, itself included, took the same action as it."""
    node = view.node(index)
    action, times = node.turn.action_text, 0
    while node.index != ROOT and node.turn.action_text == action:
        times += 1
        node = view.node(node.parent)
    return times
