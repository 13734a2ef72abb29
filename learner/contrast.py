"""How much there is to learn from in a batch: what outcomes differ by, and what credit makes of it. Pure.

Two definitions from outcomes, both over prompts (InfoTree's RIFB, arXiv 2605.05262, for binary outcomes):

    mixed   share of prompts with both outcomes: P(0 < k < G)                       `report.outcome_metrics`
    rifb    mean of 2 √(p̂ (1 − p̂)), p̂ = k / G: what a z-score pays per branch on average, sign left out

And one from what was paid, whatever the credit: the mean over trees of Σ over branches of weight · mean |A|.
Under `grpo` with many leaves the last is `rifb`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from common.nouns import RewardSource, Tree
from learner.credit.base import BranchCredit
from learner.credit.groups import group_of

SUCCESS = 0.5
"""Least raw reward of a branch that counts as a success."""


def rifb(tree: Tree) -> float:
    """2 √(p̂ (1 − p̂)) of the branches of which the environment said the outcome; 0 where there are none. A
    success earned one half at least, in raw rewards."""
    group = group_of(tree)
    outcomes = [
        raw >= SUCCESS
        for leaf, raw in zip(group.leaves, group.raw, strict=True)
        if leaf.outcome is not None and leaf.outcome.source is RewardSource.ENVIRONMENT
    ]
    share = sum(outcomes) / max(1, len(outcomes))
    return 2 * math.sqrt(share * (1 - share))


def has_mixed_versions(tree: Tree) -> bool:
    """Whether its turns were sampled under more than one version: a credit that compares its branches then
    compares policies too, which is allowed, and biases it."""
    return len({run.version for node in tree.nodes for run in node.turn.versions}) > 1


def advantage_mass(credits: Sequence[BranchCredit]) -> float:
    """Σ over a tree's branches of weight · mean over its turns of |A|."""
    return math.fsum(
        credit.weight * math.fsum(map(abs, credit.advantages)) / len(credit.advantages)
        for credit in credits
        if credit.advantages
    )


def contrast_metrics(trees: Sequence[Tree], credits: Iterable[Sequence[BranchCredit]]) -> dict[str, float]:
    """Of a batch: `rifb`, `advantage_mass` with its extremes, `trees_without_gradient` and
    `trees_of_mixed_versions`, both as shares; empty for an empty batch.

    Args:
        trees: of the batch.
        credits: of each tree.
    """
    masses = [advantage_mass(of_tree) for of_tree in credits]
    if not trees or not masses:
        return {}
    return {
        "rifb": math.fsum(map(rifb, trees)) / len(trees),
        "trees_of_mixed_versions": sum(map(has_mixed_versions, trees)) / len(trees),
        "advantage_mass": math.fsum(masses) / len(masses),
        "advantage_mass_min": min(masses),
        "advantage_mass_max": max(masses),
        "trees_without_gradient": sum(mass == 0 for mass in masses) / len(masses),
    }
