"""`grpo`: z-score of the outcomes of one prompt's leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit, branch_turns


def grpo(tree: Tree, settings: CreditConfig) -> list[BranchCredit]:
    """A = (r − mean) / (std + ε) over the tree's leaves, every turn of a branch alike, weight 1 / leaves.

    See "DeepSeekMath" (arXiv 2402.03300, §4.1); constants as in verl: Bessel-corrected std, ε = 1e-6. Where
    verl pays a singleton its raw reward, a group without contrast (one leaf, or all rewards equal) is paid
    exactly 0 here: nothing was compared. The realised number of leaves is in the weight and in the mean, so
    under adaptive branching the gradient depends on how many branches came to be and the estimate is biased,
    as published.
    """
    leaves = list(tree.leaves())
    scores = z_scores([leaf.outcome.reward for leaf in leaves if leaf.outcome is not None], settings.epsilon)
    credits = []
    for leaf, score in zip(leaves, scores, strict=True):
        turns = branch_turns(tree, leaf)
        credits.append(BranchCredit(leaf, turns, (score,) * len(turns), 1.0 / len(leaves)))
    return credits


def z_scores(rewards: Sequence[float], epsilon: float) -> list[float]:
    """(r − mean) / (std + ε), `[n]` to `[n]`; exactly zeros where there is no contrast.

    Decided by comparing the rewards themselves: the mean of equal rewards may differ from them in the last
    bit, and ε would blow that up. Two passes, since E[x²] − E[x]² cancels.
    """
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + epsilon) for reward in rewards]
