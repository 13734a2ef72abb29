"""What trees cost: continuations and action tokens, of those from the prompt and of those from prefixes.

A budget counts continuations, but one that starts late is short: what is spent is told in both.
"""

from __future__ import annotations

from collections import Counter

from allocator.tree import GrowingTree
from common.nouns import NO_LEASE, ROOT, RewardSource


def count_tree(account: Counter[str], tree: GrowingTree) -> None:
    """A tree is closed: add what it cost, and whether its outcomes differ."""
    returns = set()
    nodes, earned = tree.nodes, tree.earned_up_to()
    for branch in tree.branches.values():
        kind = "heirs" if branch.heir_of != NO_LEASE else "roots" if branch.anchor == ROOT else "prefixes"
        account[kind] += 1
        account[f"{kind}_tokens"] += sum([nodes[i].turn.num_action_tokens for i in branch.nodes])
        if branch.outcome is not None and branch.outcome.source is RewardSource.ENVIRONMENT:
            returns.add(round(earned[branch.anchor] + branch.outcome.raw_reward, 9))
    account["trees"] += 1
    account["mixed"] += len(returns) > 1


def account_stats(account: Counter[str]) -> dict[str, float]:
    """Means over the closed trees; of a heir's tokens, those of its own turns. Empty before the first one."""
    trees = account["trees"]
    if not trees:
        return {}
    values = {"trees": float(trees), "mixed_share": account["mixed"] / trees}
    for kind in ("roots", "prefixes", "heirs"):
        values[f"{kind}_per_tree"] = account[kind] / trees
        values[f"{kind}_tokens_mean"] = account[f"{kind}_tokens"] / max(1, account[kind])
    continuations = account["roots"] + account["prefixes"]
    tokens = sum(account[f"{kind}_tokens"] for kind in ("roots", "prefixes", "heirs"))
    return values | {"continuations_per_tree": continuations / trees, "tokens_per_tree": tokens / trees}
