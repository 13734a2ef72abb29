"""`granted`: return minus what was predicted before the turn was sampled. The unbiased default."""

from __future__ import annotations

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit, branch_turns, turn_baselines


def granted(tree: Tree, settings: CreditConfig) -> list[BranchCredit]:
    """A_t = R − b_t, weight as granted.

    R is the outcome of the branch's own continuation, b_t the prediction made from the past alone (fixed at
    grant for its first turn, the value of the previous node for later ones), and the weight was fixed when
    the continuation was granted. Nothing here depends on how many branches came to be, which keeps the
    estimate unbiased under adaptive branching, as long as `node_weight=granted` pays each token by its own
    continuation only: `leaf_share` and `once` bring the realised number of branches back in. See REINFORCE
    with a state-dependent baseline (Sutton & Barto 2018, §13.4).
    """
    del settings  # has no constants
    baselines = turn_baselines(tree)
    credits = []
    for continuation in tree.continuations:
        if continuation.outcome is None:
            continue
        turns = branch_turns(tree, continuation)
        paid = tuple(continuation.outcome.reward - baselines[node.index] for node in turns)
        credits.append(BranchCredit(continuation, turns, paid, continuation.weight))
    return credits
