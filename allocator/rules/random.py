"""`random`: Tree-GRPO's sampler (arXiv 2509.21240 §3; AMAP-ML/Tree-GRPO).

M chains run from the prompt; then in each round N expansion nodes per chain are drawn uniformly, with
replacement, from the root and the non-leaf turns of that chain's tree, and each is run to the end. Published
constants: M = 2, N = 2, one round.
"""

from __future__ import annotations

import math

from allocator.rules.base import (
    COMPLETE,
    WAIT,
    BranchView,
    Decision,
    EventKind,
    Pick,
    Rule,
    Scored,
    TreeView,
    open_turns,
)
from allocator.rules.reading import best_first, from_the_prompt
from common.nouns import ROOT


class RandomRule(Rule):
    """`chains` M, `expansions` N. One round over all chains is one decision.

    A branch's `group` is its chain. With a score staleness D above 0 a round may be drawn while chains are
    still running, from the turns known by then; it waits until each chain has at least one, since before that
    every draw would be the root.
    """

    name = "random"
    reads = frozenset({EventKind.NODE})

    def __init__(self, chains: int, expansions: int) -> None:
        self.chains = chains
        self.expansions = expansions

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        members = self._members(view)
        missing = [chain for chain in range(self.chains) if not members[chain]]
        if missing:
            return Decision(picks=tuple(Pick(ROOT, group=chain) for chain in missing[: view.budget_left]))
        if not all(branches[0].nodes or branches[0].ended for branches in members):
            return WAIT
        return self._round(view, members)

    def explain(self, view: TreeView) -> list[Scored]:
        """How likely each node is what a draw of the round takes, whichever chain draws; by chain in the
        terms."""
        members = self._members(view)
        missing = sum(not branches for branches in members)
        if missing:
            return from_the_prompt(missing)
        terms: dict[int, dict[str, float]] = {}
        for chain, branches in enumerate(members):
            candidates = expansion_nodes(view, branches)
            for node in candidates:
                terms.setdefault(node, {})[f"chain {chain}"] = 1.0 / len(candidates)
        return best_first(
            Scored(node, math.fsum(each.values()) / self.chains, each) for node, each in terms.items()
        )

    def _round(self, view: TreeView, members: list[list[BranchView]]) -> Decision:
        """N draws a chain, fewer for a chain that got some of this round's leases already."""
        done = [len(branches) - 1 for branches in members]
        target = (min(done) // self.expansions + 1) * self.expansions
        draws = view.draws()
        picks = []
        for chain, branches in enumerate(members):
            candidates = expansion_nodes(view, branches)
            for _ in range(target - done[chain]):
                picks.append(Pick(candidates[draws.index(len(candidates))], group=chain))
        return Decision(picks=tuple(picks[: view.budget_left]))

    def _members(self, view: TreeView) -> list[list[BranchView]]:
        members: list[list[BranchView]] = [[] for _ in range(self.chains)]
        for branch in view.branches.values():
            members[branch.group].append(branch)
        return members


def expansion_nodes(view: TreeView, branches: list[BranchView]) -> list[int]:
    """The root and the open turns of a chain's tree, by (owner, offset)."""
    return [ROOT, *open_turns(view.node, branches)]
