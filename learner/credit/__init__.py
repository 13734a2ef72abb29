"""Credit estimators: what each turn of each branch is paid. One small pure module per method.

| credit        | A of a turn                                          | weight of a branch          |
|---------------|------------------------------------------------------|-----------------------------|
| `granted`     | return of its continuation − what was predicted      | as granted                  |
| `grpo`        | z-score over the tree's leaves                       | 1 / leaves                  |
| `dr_grpo`     | r − mean over the leaves                             | as granted                  |
| `rloo`        | r − mean over the other leaves                       | as granted                  |
| `edge`        | value of an edge − mean of its siblings              | as granted, or Π 1 / forks  |
| `tree_vtrace` | V-trace along the branch, with the ratios of turns   | as granted                  |
"""

from __future__ import annotations

from collections.abc import Mapping

from learner.credit.base import NO_EVIDENCE, BranchCredit, Credit, CreditMethod, Evidence
from learner.credit.edge import edge
from learner.credit.granted import granted
from learner.credit.grpo import dr_grpo, grpo, rloo
from learner.credit.tree_vtrace import tree_vtrace

CREDITS: Mapping[str, CreditMethod] = {
    "granted": CreditMethod(granted),
    "grpo": CreditMethod(grpo),
    "dr_grpo": CreditMethod(dr_grpo),
    "rloo": CreditMethod(rloo),
    "edge": CreditMethod(edge),
    "tree_vtrace": CreditMethod(tree_vtrace, needs_ratios=True, has_critic=True),
}
"""`learner.credit.name` to its method."""

__all__ = ["CREDITS", "NO_EVIDENCE", "BranchCredit", "Credit", "CreditMethod", "Evidence"]
