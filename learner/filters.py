"""Group filters: prompts of a batch without contrast give no policy gradient. Pure.

    BranchCredit of a tree ──raw rewards all equal?──▶ every advantage 0 (counted), else as they are

What is filtered is trained with a gradient of zero, and nothing else changes: its tree is consumed, its
tokens count as `tokens_without_contrast`, and it stays in every denominator (prompts are a constant). Nothing
refills the batch, unlike DAPO's dynamic sampling (arXiv 2503.14476, §3.2): a batch with few mixed prompts
makes a smaller step. To spend the rollouts on mixed prompts instead is the budgets' work (`trace_roots`,
`adaptive`). Terms without an advantage (KL, entropy) are not filtered.

Group credits pay such prompts exactly 0 anyway. Under `granted` and `tree_vtrace` a uniform prompt does teach
(its return less what was predicted), and to filter by outcomes biases the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from common.config_learner import GroupFilterConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit
from learner.credit.groups import differ, group_of


@dataclass(slots=True)
class FilterCounts:
    """What the filter saw of a batch, and what the groups that it took were like."""

    groups: int = 0
    filtered: int = 0
    branches: int = 0
    """Of the filtered groups, as what follows."""
    branch_tokens: int = 0
    """Sum over the branches of their action tokens from the prompt."""
    branch_reward: float = 0.0
    """Sum of raw rewards."""

    def metrics(self) -> dict[str, float]:
        """Share of the groups filtered; length and success of their branches, where there are any."""
        found = {"filtered_groups": self.filtered / max(1, self.groups)}
        if self.branches:
            found["filtered_success"] = self.branch_reward / self.branches
            found["filtered_tokens"] = self.branch_tokens / self.branches
        return found


def filter_group(
    tree: Tree, credits: Sequence[BranchCredit], settings: GroupFilterConfig, counts: FilterCounts
) -> list[BranchCredit]:
    """The credits of a tree, with advantages of exactly 0 where the filter takes it; `counts` is added to.

    By raw rewards: a penalty on length must not make seven equal failures look mixed. A group in which fewer
    than two branches have an outcome has nothing to compare, whatever became of the others.

    Raises:
        ValueError: a reward is not finite.
    """
    counts.groups += 1
    group = group_of(tree)
    if settings.name == "none" or differ(group.raw, settings.tolerance):
        return list(credits)
    counts.filtered += 1
    counts.branches += len(group)
    counts.branch_reward += sum(group.raw)
    turns = (node for branch in group.branches for node in branch)
    counts.branch_tokens += sum(node.turn.num_action_tokens for node in turns)
    return [dataclasses.replace(credit, advantages=(0.0,) * len(credit.turns)) for credit in credits]
