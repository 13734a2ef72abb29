"""`granted`: return minus what was predicted before the turn was sampled. The unbiased default."""

from __future__ import annotations

from common.config_learner import CreditConfig
from common.nouns import Tree
from learner.credit.base import BranchCredit, Evidence, branch_turns, returns_by_owner, turn_baselines


def granted(tree: Tree, settings: CreditConfig, evidence: Evidence) -> list[BranchCredit]:
    """A_t = R − b_t, weight as granted.

    R is the return of the continuation that sampled the turn, from its own first turn on. For the branch's
    continuation that is its outcome; for a lease that ended at a horizon it is what its turns earned before,
    and what came after them along the heir of this branch. The heirs' weights are shares of the lease's, so
    that the sum over their branches pays it by the weighted return of its heirs. b_t is the prediction made
    from the past alone (fixed at grant for the first turn, the value of the previous node for later ones),
    and the weight was fixed when the continuation was granted. Nothing here depends on how many branches came
    to be, which keeps the estimate unbiased under adaptive branching, as long as `node_weight=granted` pays
    each token by its own continuation only: `leaf_share` and `once` bring the realised number of branches
    back in. Where a rule stops paths or draws among them, the return is that of the rollout actually run: it
    depends on the company a path had, and its own turns are paid for their effect on it alone. See REINFORCE
    with a state-dependent baseline (Sutton & Barto 2018, §13.4).
    """
    del settings, evidence  # nothing but the tree
    baselines = turn_baselines(tree)
    credits = []
    for continuation in tree.continuations:
        if continuation.outcome is None:
            continue
        turns = branch_turns(tree, continuation)
        returns = returns_by_owner(turns, continuation)
        paid = tuple(returns[node.lease] - baselines[node.index] for node in turns)
        credits.append(BranchCredit(continuation, turns, paid, continuation.weight))
    return credits
