"""ARPO (arXiv 2507.19849; RUC-NLPIR/ARPO): branch behind turns at which the policy grew unsure.

Level by level, in order within a level, each turn that is not the last of its path gets `beam` − 1 attempts
to branch behind it, until the budget is used. One succeeds when

    U − weight · ΔH ≤ threshold      U uniform in [0, 1]; ΔH = H(turn) − H(first turn of its path)
                                     H = Σ entropies of the first `window` tokens / log |V|

that is with probability clip(threshold + weight · ΔH, 0, 1): a high entropy helps. When no turn is left,
the rest of the budget starts at the prompt. Published: 8 initial trajectories of 16, beam 2, 0.5 and 0.2.

So does the code; the paper branches where α + β ΔH > τ, without chance. Two things are as in the paper, not
the code: H(first) is that of the initial trajectory (the code lets a branch begin anew, and never resets
what it kept from earlier batches), and the rest of the budget starts at once (the code: one by one, with
branches of their own). The code sums over the ten likeliest tokens of each place; here it is the whole
distribution, hence a little more. In a vocabulary as large as the published one an attempt is nearly a coin
flip, there as here.

Reconstruction, for trees whose continuations run apart: a level is one decision, made as soon as no path
can bring more turns of that level.
"""

from __future__ import annotations

import math

from allocator.rules.base import WAIT, BranchView, Decision, Draws, Pick, Scored, TreeView
from allocator.rules.reading import best_first, from_the_prompt
from common.config_allocator import EntropyRuleConfig
from common.nouns import ROOT, Node, TurnStatus, floats

LEFTOVER = -1
"""Group of continuations that start at the prompt because no turn was left to branch at. Of all others
it is the depth of their anchor."""


def decide(config: EntropyRuleConfig, view: TreeView) -> Decision:
    """The next level that branches. Levels that do not leave no trace: they are drawn again each time, and
    come out the same, since a level is looked at only when it is complete."""
    branches, draws = view.branches.values(), view.draws()
    level = _next_level(view)
    while level:
        if any(_running(view, b) and view.node(b.anchor).depth + len(b.nodes) < level for b in branches):
            return WAIT
        turns = _turns_at(view, level)
        picks = _attempts(config, view, turns, draws)
        if picks:
            return Decision(picks=tuple(picks))
        level = level + 1 if turns else 0
    return Decision(picks=(Pick(ROOT, group=LEFTOVER),) * view.budget_left)


def explain(config: EntropyRuleConfig, view: TreeView) -> list[Scored]:
    """The chance of an attempt at each turn that may still branch."""
    level = _next_level(view)
    turns = [view.node(index) for branch in view.branches.values() for index in branch.nodes]
    chances = [chance(config, view, turn) for turn in turns if level and turn.depth >= level]
    return best_first(c for c in chances if c is not None) or from_the_prompt(view.budget_left)


def chance(config: EntropyRuleConfig, view: TreeView, turn: Node) -> Scored | None:
    """How likely one attempt behind a turn succeeds; None where none is made."""
    now, first = uncertainty(config, turn), uncertainty(config, _first_turn(view, turn))
    if turn.turn.status is not TurnStatus.OPEN or now is None or first is None:
        return None
    likely = 1.0 if config.threshold == 1 else config.threshold + config.weight * (now - first)
    terms = {"entropy": now, "first": first, "level": float(turn.depth)}
    return Scored(turn.index, min(1.0, max(0.0, likely)), terms)


def uncertainty(config: EntropyRuleConfig, turn: Node) -> float | None:
    """H of a turn, in units of log |V|; None = never scored."""
    entropies = floats(turn.turn.entropies)[: config.window].tolist()
    return math.fsum(entropies) / math.log(config.vocabulary) if entropies else None


def _attempts(config: EntropyRuleConfig, view: TreeView, turns: list[Node], draws: Draws) -> list[Pick]:
    picks: list[Pick] = []
    for turn in turns:
        scored = chance(config, view, turn)
        for _ in range(config.beam - 1 if scored is not None else 0):
            if len(picks) == view.budget_left:
                return picks
            if scored is not None and draws.weighted((scored.total, 1 - scored.total)) == 0:
                picks.append(Pick(turn.index, group=turn.depth))
    return picks


def _next_level(view: TreeView) -> int:
    """Depth of the turns that may branch next; 0 once the rest of the budget went to the prompt."""
    groups = {branch.group for branch in view.branches.values()}
    return 0 if LEFTOVER in groups else max(groups) + 1


def _running(view: TreeView, branch: BranchView) -> bool:
    """Whether more turns may come. A last turn tells, before its actor says that the path is over."""
    tip = view.node(branch.nodes[-1] if branch.nodes else branch.anchor)
    return not branch.ended and tip.turn.status is TurnStatus.OPEN


def _turns_at(view: TreeView, depth: int) -> list[Node]:
    """Turns of a depth, by the number of their owner: a path has one at most."""
    found = []
    for branch in view.branches.values():
        offset = depth - 1 - view.node(branch.anchor).depth
        if 0 <= offset < len(branch.nodes):
            found.append(view.node(branch.nodes[offset]))
    return found


def _first_turn(view: TreeView, turn: Node) -> Node:
    while turn.depth > 1:
        turn = view.node(turn.parent)
    return turn
