"""`entropy`: branch where the policy is unsure, in one of two published forms: ARPO or AT²PO.

Both begin with `initial` trajectories from the prompt; what follows is in `arpo.py` and `at2po.py`. Neither
looks at outcomes. Entropies come with the turns; a turn that has none was never scored, and is no
candidate.
"""

from __future__ import annotations

from allocator.rules import arpo, at2po
from allocator.rules.base import COMPLETE, Decision, EventKind, Pick, Rule, Scored, TreeView
from allocator.rules.reading import from_the_prompt
from common.config_allocator import EntropyRuleConfig
from common.nouns import ROOT


class EntropyRule(Rule):
    """A branch's `group` is 0 for the initial ones; then ARPO's level, or AT²PO's iteration."""

    name = "entropy"
    reads = frozenset({EventKind.NODE})

    def __init__(self, config: EntropyRuleConfig) -> None:
        self.config = config
        self.turns_need = frozenset({"entropies" if config.form == "arpo" else "logprobs"})

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        missing = self._missing(view)
        if missing:
            return Decision(picks=(Pick(ROOT),) * min(missing, view.budget_left))
        if self.config.form == "arpo":
            return arpo.decide(self.config, view)
        return at2po.decide(self.config, view)

    def explain(self, view: TreeView) -> list[Scored]:
        missing = self._missing(view)
        if missing:
            return from_the_prompt(missing)
        if self.config.form == "arpo":
            return arpo.explain(self.config, view)
        return at2po.explain(self.config, view)

    def _missing(self, view: TreeView) -> int:
        """Initial trajectories that have not been started."""
        return max(0, self.config.initial - sum(b.group == 0 for b in view.branches.values()))
