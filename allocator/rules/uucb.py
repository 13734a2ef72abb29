"""`uucb`: InfoTree's choice of states to expand (arXiv 2605.05262). Only the abstract was at hand: all that
follows is reconstruction.

The abstract: choosing states is a monotone submodular maximisation, the three terms of UUCB are marginal
gains of its objective, and choosing greedily reaches 1 − 1/e of the best. The objective here, for the
multiset S of continuations started so far, each at an anchor v:

    F(S) = value       · Q(S)
         + exploration · Σ_v Σ_{j = 1 … n_v} √(log N / j)      n_v: how many of S started at v
         + entropy     · Σ_{v ∈ S} H(v)

    UUCB(v | S) = F(S + v) − F(S)
                = value · (Q(S + v) − Q(S)) + exploration · √(log N / (1 + n_v)) + entropy · H(v)

One continuation is chosen after the other: the greatest UUCB, the earlier anchor where equal.

*Value*, by `potential`, with V(v) the success predicted now for a continuation from v:

    mixing      Q(S) = Σ_{v ∈ S} 4 V (1 − V)
    success     Q(S) = Σ_{v ∈ S} V
    contrast    Q(S) = Σ_u decay^depth(u) · E[how many different outcomes, 0 to 2, come under u]
                gain = Σ_u decay^depth(u) · (V(v) · P(no success under u yet)
                                             + (1 − V(v)) · P(no failure under u yet)),  u: v and its prefixes

The first two are modular, so F is separable and greedy finds its maximum. `contrast` is the prompt's chance
to be mixed, RIFB as P(0 < k < G), plus 1, and the same below each turn, worth less the deeper. An ended
continuation counts with its return in [0, 1], an outstanding one with V of its anchor, one without an
outcome (dropped) not at all, as independent draws. This is a coverage function that couples the choices,
since a continuation from v serves all prefixes of v: F is not separable, greedy not always the best, and
the bound is needed. Once both outcomes are there it has nothing more to gain, while `mixing` goes on to
balance them, which the other form of RIFB, E[2 √(p (1 − p))], rewards: hence the default.

*Exploration.* Whatever started at v is a visit, outstanding and dropped ones too, so that leases granted
together spread (virtual loss). N is the prompt's allowance: the sum depends on S alone.

*Entropy.* Given the policy, actions are independent draws, so their joint entropy is the sum of their
entropies. H(v) is the mean token entropy, nats, of the turns sampled at v so far: per token, or long turns
would win by length. An anchor where no turn was scored takes the mean of those where one was, not zero.

V moves with what becomes known, hence F too; the bound holds for each F. A process score is read with the
turn that it came with, and counts as that.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from allocator.rules.base import COMPLETE, WAIT, Decision, EventKind, Pick, Rule, Scored, TreeView
from allocator.rules.reading import best_first, blank, from_the_prompt, mean_entropy, returned
from common.config_allocator import UucbRuleConfig
from common.nouns import ROOT


class UucbRule(Rule):
    """Waits until each of the `initial` continuations has a turn: before, only the prompt could be chosen."""

    name = "uucb"
    reads = frozenset({EventKind.NODE, EventKind.OUTCOME, EventKind.PREDICTOR})

    def __init__(self, config: UucbRuleConfig) -> None:
        self.config = config

    def decide(self, view: TreeView) -> Decision:
        if view.budget_left == 0:
            return COMPLETE
        missing = self._missing(view)
        if missing:
            return Decision(picks=(Pick(ROOT),) * min(missing, view.budget_left))
        if blank(list(view.branches.values())[: self.config.initial]):
            return WAIT
        best = max(self._gains(view), key=lambda scored: scored.total)
        return Decision(picks=(Pick(best.anchor),))

    def explain(self, view: TreeView) -> list[Scored]:
        """UUCB of every anchor."""
        missing = self._missing(view)
        return from_the_prompt(missing) if missing else best_first(self._gains(view))

    def _missing(self, view: TreeView) -> int:
        return max(0, self.config.initial - len(view.branches))

    def _gains(self, view: TreeView) -> list[Scored]:
        """In canonical order."""
        config, anchors = self.config, view.anchors()
        success = {anchor: view.predict(anchor).mean for anchor in anchors}
        value = self._values(view, success)
        visits = Counter(branch.anchor for branch in view.branches.values())
        log_budget = math.log(max(1, view.allowance or 1))
        entropy = entropies(view)
        usual = math.fsum(entropy.values()) / len(entropy) if entropy else 0.0
        gains = []
        for anchor in anchors:
            terms = {
                "value": config.value * value[anchor],
                "exploration": config.exploration * math.sqrt(log_budget / (1 + visits[anchor])),
                "entropy": config.entropy * entropy.get(anchor, usual),
            }
            gains.append(Scored(anchor, math.fsum(terms.values()), terms))
        return gains

    def _values(self, view: TreeView, success: Mapping[int, float]) -> dict[int, float]:
        """What one more continuation adds to the value term, before its weight."""
        if self.config.potential == "success":
            return dict(success)
        if self.config.potential == "mixing":
            return {anchor: 4 * v * (1 - v) for anchor, v in success.items()}
        missing = missing_outcomes(view, success, self.config.decay)
        return {a: v * missing[a][0] + (1 - v) * missing[a][1] for a, v in success.items()}


def missing_outcomes(
    view: TreeView, success: Mapping[int, float], decay: float
) -> dict[int, tuple[float, float]]:
    """By node: Σ decay^depth · P(no success yet) over it and its prefixes, and the same for failure."""
    none = _none_yet(view, success)
    total = {ROOT: none[ROOT]}
    for branch in view.branches.values():
        for index in branch.nodes:
            node = view.node(index)
            worth, above = decay**node.depth, total[node.parent]
            total[index] = (above[0] + worth * none[index][0], above[1] + worth * none[index][1])
    return total


def _none_yet(view: TreeView, success: Mapping[int, float]) -> Mapping[int, tuple[float, float]]:
    """By node: P(no success), P(no failure) among the continuations that start at it or pass through it."""
    none: dict[int, tuple[float, float]] = defaultdict(lambda: (1.0, 1.0))
    for branch in reversed(list(view.branches.values())):  # all that start below it come first
        chance = returned(branch) if branch.ended else success[branch.anchor]
        if chance is not None:
            tip = branch.nodes[-1] if branch.nodes else branch.anchor
            none[tip] = _both(none[tip], (1 - chance, chance))
        for index in reversed(branch.nodes):
            parent = view.node(index).parent
            none[parent] = _both(none[parent], none[index])
    return none


def _both(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return a[0] * b[0], a[1] * b[1]


def entropies(view: TreeView) -> dict[int, float]:
    """By anchor: mean of the mean token entropies of the turns sampled there, nats. Only where scored."""
    found: dict[int, list[float]] = defaultdict(list)
    for branch in view.branches.values():
        for index in branch.nodes:
            node = view.node(index)
            entropy = mean_entropy(node)
            if entropy is not None:
                found[node.parent].append(entropy)
    return {anchor: math.fsum(each) / len(each) for anchor, each in found.items()}
