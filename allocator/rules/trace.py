"""`trace`: local prefix expansion of TRACE (arXiv 2606.11119, its second stage; known from third-party
notes).

How many rollouts each prompt gets (the first stage) is the budget's business: `trace_roots`, or the same
for all. Of an allowance A, m = max(1, A // (1 + N)) continuations start at the prompt, at once. When they
have ended, the other A − m go to prefixes of theirs: turns after which a rollout went on. With the return r
of the rollout that owns a prefix H, and the success V(H) predicted there,

    q = r · V + (1 − r) · (1 − V)      chance that a continuation agrees with what was realised
    1 − q^K                            chance that one of K does not: they go where the sum is greatest

The gain of one more, q^k · (1 − q), falls with k, so taking the greatest one after the other (a heap) is
exact. This looks for surprises, not for V (1 − V): a success where V was low, a failure where it was high.

Reconstruction, where the notes are silent:

*V before or after the fact.* The paper's predictor sees the text of a prefix; its V knows nothing of the
outcome it is compared with. But q is about a fresh continuation, and r is evidence about that one too: a
success at V = 0.1 also says that 0.1 may have been too low. Hence V is what is predicted now (`posterior`),
by a predictor that may look at how the tree's continuations ended. Without that, errors of the predictor
are taken for surprises, and sought out. `posterior=false` is the paper's reading: what was predicted when
the prefix was reached. For a predictor that does not look at outcomes the two are nearly the same.

*Candidates.* Only prefixes of continuations from the prompt: those below later ones have outcomes that this
stage itself went looking for. The prompt is none: it is the first stage's. A rollout without an outcome of
the environment (dropped) has no r, and none. Where there is no candidate at all, the rest starts at the
prompt.

*Counting.* What is left of A by 1 + N goes to prefixes. r may be any number in [0, 1]. Continuations that
started at a prefix already, outstanding or with an outcome, count in its k. Equal gains go to the smaller
k, then to the earlier prefix.

*Staleness.* With D = 0 all of the second stage is one decision. Above, N continuations become available
with each rollout that has ended, so that a straggler does not hold them all.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from allocator.rules.base import COMPLETE, WAIT, BranchView, Decision, EventKind, Pick, Rule, Scored, TreeView
from allocator.rules.reading import best_first, from_the_prompt, returned
from common.config_allocator import TraceRuleConfig
from common.nouns import ROOT, TurnStatus


class TraceRule(Rule):
    """See the module."""

    name = "trace"
    reads = frozenset({EventKind.NODE, EventKind.OUTCOME, EventKind.PREDICTOR})

    def __init__(self, config: TraceRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        missing = self._missing(view)
        if missing:
            return Decision(picks=(Pick(ROOT),) * min(missing, view.budget_left))
        available = self._available(view)
        if available <= 0:
            return WAIT
        prefixes = self._prefixes(view)
        if prefixes:
            return Decision(picks=tuple(Pick(anchor) for anchor in most_flips(prefixes, available)))
        return WAIT if available < view.budget_left else Decision(picks=(Pick(ROOT),) * available)

    def explain(self, view: TreeView) -> list[Scored]:
        """The gain of one more continuation at each prefix."""
        missing = self._missing(view)
        if missing:
            return from_the_prompt(missing)
        return best_first(self._prefixes(view)) or from_the_prompt(view.budget_left)

    def _missing(self, view: TreeView) -> int:
        """Rollouts from the prompt that have not been started."""
        wanted = max(1, (view.allowance or 0) // (1 + self.config.per_root))
        return max(0, wanted - len(_rollouts(view)))

    def _available(self, view: TreeView) -> int:
        """Continuations from prefixes that may start now: all that are left when every rollout has ended,
        else N for each that has."""
        rollouts = _rollouts(view)
        ended = sum(bool(rollout.ended) for rollout in rollouts)
        if ended == len(rollouts):
            return view.budget_left
        started = len(view.branches) - len(rollouts)
        return min(view.budget_left, self.config.per_root * ended - started)

    def _prefixes(self, view: TreeView) -> list[Scored]:
        """Candidates in canonical order."""
        started = Counter(
            branch.anchor
            for branch in view.branches.values()
            if not branch.ended or branch.outcome is not None
        )
        scored = []
        for rollout in _rollouts(view):
            r = returned(rollout)
            if r is None:
                continue
            for index in rollout.nodes:
                if view.node(index).turn.status is TurnStatus.OPEN:
                    value, k = self._value(view, index), started[index]
                    q = r * value + (1 - r) * (1 - value)
                    terms = {"value": value, "return": r, "agreement": q, "started": float(k)}
                    scored.append(Scored(index, q**k * (1 - q), terms))
        return scored

    def _value(self, view: TreeView, index: int) -> float:
        reached_with = None if self.config.posterior else view.node(index).value
        return view.predict(index).mean if reached_with is None else reached_with


def most_flips(prefixes: Sequence[Scored], total: int) -> list[int]:
    """The `total` continuations of greatest summed 1 − q^K, as anchors, in the order they were taken."""
    heap = [(-each.total, each.terms["started"], place) for place, each in enumerate(prefixes)]
    heapq.heapify(heap)
    taken = []
    for _ in range(total):
        gain, k, place = heap[0]
        taken.append(prefixes[place].anchor)
        heapq.heapreplace(heap, (gain * prefixes[place].terms["agreement"], k + 1, place))
    return taken


def _rollouts(view: TreeView) -> list[BranchView]:
    """Continuations from the prompt, by number."""
    return [branch for branch in view.branches.values() if branch.anchor == ROOT]
