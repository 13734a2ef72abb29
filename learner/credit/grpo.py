"""`grpo`: z-score of the outcomes of one prompt's leaves."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit, branch_reward, branch_turns


def grpo(tree: Tree, settings: CreditConfig) -> list[BranchCredit]:
    """A = (r − mean) / (std + ε) over the tree's leaves, every turn of a branch alike, weight 1 / leaves.

    r is what the whole branch earned, from the prompt to the leaf. See "DeepSeekMath" (arXiv 2402.03300,
    §4.1); constants as in verl: Bessel-corrected std, ε = 1e-6. Where verl pays a singleton its raw reward, a
    group without contrast (one leaf, or all rewards equal) is paid exactly 0 here: nothing was compared. The
    realised number of leaves is in the weight and in the mean, so under adaptive branching the gradient
    depends on how many branches came to be and the estimate is biased, as published.
    """
    leaves = list(tree.leaves())
    branches = [branch_turns(tree, leaf) for leaf in leaves]
    rewards = [branch_reward(turns, leaf) for turns, leaf in zip(branches, leaves, strict=True)]
    scores = z_scores(rewards, settings.epsilon)
    return [
        BranchCredit(leaf, turns, (score,) * len(turns), 1.0 / len(leaves))
        for leaf, turns, score in zip(leaves, branches, scores, strict=True)
    ]


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
