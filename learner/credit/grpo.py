"""`grpo`: z-score of the outcomes of one prompt's leaves; `dr_grpo` and `rloo`: its plain relatives.

| credit    | A                           | weight of a branch                                 |
|-----------|-----------------------------|----------------------------------------------------|
| `grpo`    | (r − mean) / (std + ε)      | 1 / leaves that came about                         |
| `dr_grpo` | r − mean                    | as granted: 1 / continuations of the budget        |
| `rloo`    | r − mean of the other leaves| as granted                                         |

r is what the whole branch earned, from the prompt to the leaf; every turn of a branch is paid alike. A group
without contrast (`learner.credit.groups`) is paid exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit, Evidence
from learner.credit.groups import Group, bessel_std, centred, differ, group_of


def grpo(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """A = (r − mean) / (std + ε) over the tree's leaves, weight 1 / leaves.

    See "DeepSeekMath" (arXiv 2402.03300, §4.1); constants as in verl: Bessel-corrected std, ε = 1e-6. Where
    verl pays a singleton its raw reward, a group without contrast (one leaf, or all rewards equal) is paid
    exactly 0 here: nothing was compared. The realised number of leaves is in the weight and in the mean, so
    under adaptive branching the gradient depends on how many branches came to be and the estimate is biased,
    as published.
    """
    del evidence
    group = group_of(tree)
    scores = z_scores(group.rewards, settings.epsilon, settings.tolerance)
    return paid(group, scores, settings, [1.0 / len(group)] * len(group))


def dr_grpo(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """A = r − mean over the tree's leaves: no std, no length, constant denominators.

    See "Understanding R1-Zero-Like Training" (arXiv 2503.20783, §3.2). Its loss sums over tokens and divides
    by constants; here they are the continuations that the budget planned (the weight fixed at the grant) and
    the prompts of a step (the update's). Neither tokens nor leaves that came about are in them. The mean
    holds the branch itself, which scales a flat group's gradient by (n − 1) / n.
    """
    del evidence
    group = group_of(tree)
    return paid(group, centred(group.rewards), settings, [leaf.weight for leaf in group.leaves])


def rloo(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """A = r − mean of the other leaves = n / (n − 1) (r − mean), weight as granted.

    See "Back to Basics" (arXiv 2402.14740, §3.3). A baseline of the others only is unbiased where leaves are
    independent draws from the prompt (`flat`); leaves that share turns, or that outcomes led to, are not.
    """
    del evidence
    group = group_of(tree)
    factor = len(group) / max(1, len(group) - 1)
    scores = [factor * part for part in centred(group.rewards)]
    return paid(group, scores, settings, [leaf.weight for leaf in group.leaves])


def paid(
    group: Group, scores: Sequence[float], settings: CreditConfig, weights: Sequence[float]
) -> list[BranchCredit]:
    """Every turn of a branch its score, or exactly 0 in a group without contrast."""
    contrast = group.has_contrast(settings.tolerance)
    return [
        BranchCredit(leaf, turns, (score if contrast else 0.0,) * len(turns), weight)
        for leaf, turns, score, weight in zip(group.leaves, group.branches, scores, weights, strict=True)
    ]


def z_scores(rewards: Sequence[float], epsilon: float, tolerance: float = 0.0) -> list[float]:
    """(r − mean) / (std + ε), `[n]` to `[n]`; exactly zeros where there is no contrast."""
    if not differ(rewards, tolerance):
        return [0.0] * len(rewards)
    std = bessel_std(rewards)
    return [part / (std + epsilon) for part in centred(rewards)]
