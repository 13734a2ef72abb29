"""AT²PO (arXiv 2601.04767; zzfoutofspace/ATPO): sample surprising turns again.

In iterations, each of which takes the `beam` best of the prompt and all turns that are not the last of
their path, and starts one continuation where each of these turns began. Published: 10 initial trajectories,
then 2 iterations of 6.

    score(turn) = mean −log p of its tokens − sibling_penalty · (children of its parent − 1)

As in the code: the prompt counts as a turn of surprisal 0 that begins at itself; scores are computed once
an iteration; with fewer candidates than places the list is gone through again. The code's entropy weight
and branch probability are not used there either.

Reconstruction, for trees whose continuations run apart: an iteration is one decision. With a score
staleness above 0 it looks at the turns there are, once each initial trajectory has one; an outstanding
continuation without a turn counts as a child already.
"""

from __future__ import annotations

from collections import Counter

from allocator.rules.base import WAIT, Decision, Pick, Scored, TreeView
from allocator.rules.reading import best_first, blank, surprisal
from common.config_allocator import EntropyRuleConfig
from common.nouns import ROOT, TurnStatus


def decide(config: EntropyRuleConfig, view: TreeView) -> Decision:
    """One iteration, or what is missing of it because its leases came back."""
    branches, beam = view.branches.values(), config.beam
    if blank(branch for branch in branches if branch.group == 0):
        return WAIT
    done = sum(branch.group > 0 for branch in branches)
    iteration = done // beam + 1
    ranking = ranked(config, view)
    places = min(iteration * beam - done, view.budget_left)
    chosen = [ranking[place % len(ranking)] for place in range(places)]
    return Decision(picks=tuple(Pick(scored.anchor, group=iteration) for scored in chosen))


def explain(config: EntropyRuleConfig, view: TreeView) -> list[Scored]:
    """For each anchor, the best of the turns that began there."""
    best: dict[int, Scored] = {}
    for scored in ranked(config, view):
        best.setdefault(scored.anchor, scored)
    return list(best.values())


def ranked(config: EntropyRuleConfig, view: TreeView) -> list[Scored]:
    """The prompt and all turns that went on, best first; each with the anchor that samples it again."""
    branches = view.branches.values()
    turns = [view.node(index) for branch in branches for index in branch.nodes]
    children = Counter(turn.parent for turn in turns)
    children.update(branch.anchor for branch in branches if not branch.nodes and not branch.ended)
    candidates: list[tuple[int, int, float]] = [(0, ROOT, 0.0)]
    for turn in turns:
        surprise = surprisal(turn)
        if turn.turn.status is TurnStatus.OPEN and surprise is not None:
            candidates.append((turn.depth, turn.parent, surprise))
    scored = []
    for depth, anchor, surprise in candidates:
        siblings = max(0, children[anchor] - 1)
        terms = {"surprisal": surprise, "siblings": float(siblings), "depth": float(depth)}
        scored.append(Scored(anchor, surprise - config.sibling_penalty * siblings, terms))
    return best_first(scored)
