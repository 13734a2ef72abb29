"""`edge`: each piece of the tree between two forks against its siblings.

      ┌─── a ─── b          an edge runs from a fork (or the prompt) to the next fork or leaf; all its turns
root ─┤                     share one advantage: root → a → b; root → c; c → d; c → e
      └─── c ─┬─ d          V(leaf) = what its branch earned, V(node) = mean over what is below it
              └─ e          A(edge) = V(its end) − mean of V over its siblings
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.config_learner import CreditConfig
from common.nouns import ROOT, Node, Tree
from learner.credit.base import BranchCredit, Evidence
from learner.credit.groups import Group, differ, group_of


def edge(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """A = b / (b − 1) · (V(c) − mean over the b siblings, itself included): leave one out.

    See "Segment Policy Optimization" (arXiv 2505.23564, §4, tree variant), whose node values are means over
    children and whose baseline is the parent's value, which holds the edge itself; b / (b − 1) takes it out.
    An edge without a sibling is paid 0, and so is one whose siblings all earned the same, raw rewards
    compared (`credit.tolerance`). Values are of whole branches: what was earned above a fork is the same for
    all its edges and cancels.

    `credit.node_value`: `children` is SPO's; `leaves` counts every leaf below alike. `credit.edge_weight`:
    `granted` pays the weight of the continuation (with `node_weight=once` every edge is one sample, as SPO
    trains them); `path` weighs a leaf by Π 1 / b over the forks above it, so that with
    `node_weight=leaf_share` an edge weighs Π 1 / b over the forks above *it*, and regions that branched more
    do not count more. Realised children are in all of this: biased under adaptive branching.
    """
    del evidence
    group = group_of(tree)
    forks = _Forks(tree, group, settings.node_value)
    paid = [0.0] * len(tree.nodes)
    for node in tree.nodes[ROOT + 1 :]:  # parents come before their children
        if forks.leaves[node.index]:
            alone = len(forks.entries[node.parent]) == 1
            paid[node.index] = paid[node.parent] if alone else forks.advantage(node, settings.tolerance)
    by_path = settings.edge_weight == "path"
    return [
        BranchCredit(
            leaf, turns, tuple(paid[node.index] for node in turns),
            forks.path_weight(turns) if by_path else leaf.weight,
        )
        for leaf, turns in zip(group.leaves, group.branches, strict=True)
    ]  # fmt: skip


class _Forks:
    """Values of a tree's nodes, `[nodes]` each, and what hangs below each of them.

    What ends *at* a node (a continuation that sampled nothing, or was stopped where others went on) is an
    entry beside its children: a sibling without turns.
    """

    def __init__(self, tree: Tree, group: Group, node_value: str) -> None:
        count = len(tree.nodes)
        self.entries: list[list[int]] = [[] for _ in range(count)]
        """Children with a leaf at or below them; −1 for each branch that ends here."""
        self.leaves = [0] * count
        """Branches that end at or below each node."""
        self._ends: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        for turns, raw, reward in zip(group.branches, group.raw, group.rewards, strict=True):
            end = turns[-1].index if turns else ROOT
            self._ends[end].append((raw, reward))
            self.entries[end].append(-1)
        self.values = [(0.0, 0.0)] * count
        """(raw, shaped) value of each node; meaningless where there is no leaf."""
        for node in reversed(tree.nodes):
            self._settle(node, node_value)

    def _settle(self, node: Node, node_value: str) -> None:
        """All its children are settled: value and count it, and tell its parent."""
        at, ends = node.index, self._ends[node.index]
        below = [child for child in self.entries[at] if child >= 0]
        self.leaves[at] = len(ends) + sum(self.leaves[child] for child in below)
        parts = [*ends, *(self.values[child] for child in below)]
        counts = [1] * len(ends) + [self.leaves[c] if node_value == "leaves" else 1 for c in below]
        if parts:
            self.values[at] = _mean([p[0] for p in parts], counts), _mean([p[1] for p in parts], counts)
            if at != ROOT:
                self.entries[node.parent].append(at)

    def advantage(self, node: Node, tolerance: float) -> float:
        """Of the edge that begins with a node, whose parent has several entries."""
        children = [child for child in self.entries[node.parent] if child >= 0]
        siblings = [*self._ends[node.parent], *(self.values[child] for child in children)]
        if not all(differ([each[kind] for each in siblings], tolerance) for kind in (0, 1)):
            return 0.0
        count = len(siblings)
        mean = math.fsum(shaped for _, shaped in siblings) / count
        return count / (count - 1) * (self.values[node.index][1] - mean)

    def path_weight(self, turns: Sequence[Node]) -> float:
        """Π 1 / b over the nodes of a branch, the leaf's own included: over all branches they sum to 1."""
        places = [ROOT, *(node.index for node in turns)]
        return 1.0 / math.prod(len(self.entries[place]) for place in places)


def _mean(values: Sequence[float], counts: Sequence[int]) -> float:
    return math.fsum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
