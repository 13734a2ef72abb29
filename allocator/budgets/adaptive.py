"""`adaptive`: a little more for trees whose outcomes are all alike, within a hard cap.

InfoTree's adaptive budget (arXiv 2605.05262; the abstract is known, the rest is a reconstruction). Each
prompt gets `continuations`. Where the rule is done and the outcomes are uniform, hence hold no contrast,
`extra` more are granted if a learned model (`rescue`) finds it likely enough that they bring the other
outcome.

    rule done ─▶ uniform? ─▶ score ≥ τ? ─▶ credit for it? ─▶ extra continuations ─▶ rescued or not ─┐
                    no: closed   no: closed     │  ▲                                                │
                                 not yet known: parked         τ, model, credit ◀── between waves ──┘

**The cap.** Credit is `overhead` × the regular continuations of the waves that are complete − the extra ones
so far. Extra continuations are paid from it in advance, so that they never exceed that share, at any moment.
What is not spent is kept. The first wave has none: it shows what uniform trees look like.

**τ** is set between waves: where the credit pays for n rescues, it is the score that n uniform trees a wave
reached among those of the last waves. So the cap is what is spent, on the most hopeful.

**Order.** Many trees of a wave are asked at any time, and yet the same ones must get it as if they had been
asked one after the other by their place. A tree takes its share at once if enough would be left even if all
undecided ones in lower places took theirs, is refused at once if those that have decided left too little,
and otherwise waits for lower places. Mixed and hopeless trees decide by closing, dropped ones by that; what
replaces them gets none. So the lowest undecided place never waits, and nothing waits for ever. With waves
that overlap (policy lag above 0), undecided places of earlier ones count as if they took their share.

**Weight.** An extra continuation weighs what a regular one does, 1/`continuations`, known beforehand; so a
rescued prompt weighs up to 1 + extra/`continuations`. The gradient at every prefix stays unbiased for its
prompt (grants look at the past only); prompts with uniform outcomes weigh slightly more, `overhead` at most
over all. Giving extra ones the weight of regular ones that are there already would change weights after their
outcomes are known.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from allocator.budgets.base import Budget, Prompt
from allocator.budgets.rescue import RescueModel, Row, describe_uniform, mixed, outcomes
from allocator.rules.base import TreeView
from common.config_allocator import AdaptiveConfig

WAVES = 4
"""Newest waves whose uniform trees set τ: enough of them to rank, few enough to be like the next."""
NOBODY, ANYBODY = 2.0, 0.0
"""τ beyond and below all scores."""


@dataclass(slots=True)
class Place:
    """What was decided for one place of a wave that is not complete."""

    tree: int
    """With which it was decided; what replaces it gets no more."""
    row: Row | None = None
    """The tree's features, if its outcomes were uniform."""
    granted: int = 0
    first: int = 0
    """Number of its first extra continuation."""
    spent: int = 0
    """Of those granted, what the rule did start."""
    rescued: bool = False


class AdaptiveBudget(Budget):
    """See the module."""

    name = "adaptive"

    def __init__(self, config: AdaptiveConfig, batch_trees: int) -> None:
        self.typical = config.continuations
        self.model = RescueModel()
        self.threshold = NOBODY
        """τ"""
        self._overhead = config.overhead
        self._extra = config.extra
        self._batch = batch_trees
        self._slots: dict[int, int] = {}
        """Places of the open trees."""
        self._rows: dict[int, Row | None] = {}
        """Features of open trees that were asked about."""
        self._decided: dict[int, Place] = {}
        """By place; of waves that are not complete."""
        self._done = 0
        """Waves that are complete: the first ones."""
        self._regular: Counter[int] = Counter()
        """Regular continuations of closed trees, by the wave with which they begin to count."""
        self._earned = 0
        """Regular continuations of complete waves."""
        self._paid = 0
        """Extra ones."""
        self._recent: deque[list[Row]] = deque(maxlen=WAVES)
        """Uniform trees of the newest waves."""
        self._counts: Counter[str] = Counter()

    # --- one tree ----------------------------------------------------------------------------------------

    def admit(self, prompt: Prompt) -> Mapping[int, int]:
        self._slots[prompt.tree] = prompt.slot
        return {prompt.tree: self.typical}

    def weight(self, tree: int) -> float:
        return 1.0 / self.typical

    def extra(self, view: TreeView) -> int | None:
        slot = self._slots[view.id]
        if self._is_decided(slot):
            return 0
        row = self._describe(view)
        if row is None or self.model.score(row) < self.threshold:
            self._decided[slot] = Place(view.id, row)
            return 0
        below, before = self._undecided(slot)
        certain = self._left(slot) - before * self._extra
        if certain < self._extra:
            self._counts["refused_by_cap"] += 1
            self._decided[slot] = Place(view.id, row)
            return 0
        if certain < (below + 1) * self._extra:
            return None
        self._decided[slot] = Place(view.id, row, self._extra, max(view.branches, default=-1) + 1)
        return self._extra

    def _describe(self, view: TreeView) -> Row | None:
        """A tree that waits does not change: it is looked at once. One whose rule left budget unused has no
        use for more."""
        if view.id not in self._rows:
            self._rows[view.id] = describe_uniform(view) if view.budget_left == 0 else None
        return self._rows[view.id]

    def _is_decided(self, slot: int) -> bool:
        return slot < self._done * self._batch or slot in self._decided

    def _undecided(self, slot: int) -> tuple[int, int]:
        """Lower places that are not decided: of its own wave, and of earlier ones."""
        start = slot - slot % self._batch
        own = sum(place not in self._decided for place in range(start, slot))
        earlier = sum(place not in self._decided for place in range(self._done * self._batch, start))
        return own, earlier

    def _left(self, slot: int) -> int:
        """Credit as it would be had nobody in a higher place been asked yet."""
        taken = sum(place.granted for lower, place in self._decided.items() if lower < slot)
        return self._credit() - taken

    def _credit(self) -> int:
        return math.floor(self._overhead * self._earned) - self._paid

    def closed(self, view: TreeView) -> None:
        slot = self._slots[view.id]
        spent = _spent(view)
        regular = min(spent, self.typical)
        self._regular[max(slot // self._batch, self._done)] += regular
        place = self._decided.get(slot)
        if place is None or place.tree != view.id:
            self._count_cost(view, Place(view.id), regular)
            return
        place.spent = spent - regular
        place.rescued = place.granted > 0 and mixed(view)
        self._count_cost(view, place, regular)
        self._counts["trees"] += bool(outcomes(view))
        self._counts["uniform"] += place.row is not None
        self._counts["attempts"] += place.spent > 0
        self._counts["rescued"] += place.rescued

    def _count_cost(self, view: TreeView, place: Place, regular: int) -> None:
        counts = self._counts
        for branch in view.branches.values():
            kind = "extra" if place.granted and branch.number >= place.first else "regular"
            counts[f"{kind}_tokens"] += sum(view.node(index).turn.num_action_tokens for index in branch.nodes)
        counts["regular"] += regular
        counts["extra"] += place.spent

    def withdraw(self, tree: int, slot: int) -> Mapping[int, int]:
        self._slots.pop(tree, None)
        self._rows.pop(tree, None)
        if not self._is_decided(slot):
            self._decided[slot] = Place(tree)
        return {}

    # --- between waves -----------------------------------------------------------------------------------

    def wave_done(self, wave: int) -> None:
        """What the wave's places taught, in their order."""
        places = [self._decided.pop(slot) for slot in range(wave * self._batch, (wave + 1) * self._batch)]
        self._done = wave + 1
        self._earned += self._regular.pop(wave, 0)
        self._paid += sum(place.spent for place in places)
        self._recent.append([place.row for place in places if place.row is not None])
        tried = [(place.row, place.rescued) for place in places if place.row is not None and place.spent]
        self.model.learn([row for row, _ in tried], [rescued for _, rescued in tried])
        self.threshold = self._choose_threshold()

    def _choose_threshold(self) -> float:
        """What as many uniform trees a wave reached as can be paid for."""
        free = self._credit() - sum(place.granted for place in self._decided.values())
        wanted = free // self._extra * len(self._recent)
        if wanted <= 0:
            return NOBODY
        scores = sorted((self.model.score(row) for rows in self._recent for row in rows), reverse=True)
        return scores[wanted - 1] if wanted <= len(scores) else ANYBODY

    # --- looking at it -----------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Of the trees closed so far: continuations, trees that were uniform when their rule was done, and
        what came of it. `overhead` is extra over regular continuations, `overhead_tokens` the same in action
        tokens (what starts late is short); `mixed_before` and `mixed_after` are shares of the trees with
        outcomes, those that replaced others left out. `threshold` is τ, `credit` what may be spent now,
        `loss` the model's on the newest attempts."""
        counts = self._counts
        trees = max(1, counts["trees"])
        names = ("regular", "extra", "uniform", "attempts", "rescued", "refused_by_cap")
        found: dict[str, float] = {name: counts[name] for name in names}
        return found | {
            "overhead": counts["extra"] / max(1, counts["regular"]),
            "overhead_tokens": counts["extra_tokens"] / max(1, counts["regular_tokens"]),
            "mixed_before": 1 - counts["uniform"] / trees,
            "mixed_after": 1 - (counts["uniform"] - counts["rescued"]) / trees,
            "rescue_rate": counts["rescued"] / max(1, counts["attempts"]),
            "threshold": self.threshold,
            "credit": self._credit() - sum(place.granted for place in self._decided.values()),
            **({} if self.model.loss is None else {"loss": self.model.loss}),
        }

    def to_state(self) -> dict[str, Any]:
        return {
            "model": self.model.to_state(),
            "threshold": self.threshold,
            "slots": sorted(self._slots.items()),
            "rows": [[tree, _plain(row)] for tree, row in sorted(self._rows.items())],
            "decided": [
                [slot, p.tree, _plain(p.row), p.granted, p.first, p.spent, p.rescued]
                for slot, p in sorted(self._decided.items())
            ],
            "done": self._done,
            "regular": sorted(self._regular.items()),
            "earned": self._earned,
            "paid": self._paid,
            "recent": [[list(row) for row in rows] for rows in self._recent],
            "counts": sorted(self._counts.items()),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        self.model.from_state(state["model"])
        self.threshold = state["threshold"]
        self._slots = dict(state["slots"])
        self._rows = {tree: _row(row) for tree, row in state["rows"]}
        self._decided = {slot: Place(tree, _row(row), *rest) for slot, tree, row, *rest in state["decided"]}
        self._done, self._earned, self._paid = state["done"], state["earned"], state["paid"]
        self._regular = Counter(dict(state["regular"]))
        self._recent = deque(([tuple(row) for row in rows] for rows in state["recent"]), maxlen=WAVES)
        self._counts = Counter(dict(state["counts"]))


def _spent(view: TreeView) -> int:
    """Continuations started; heirs cost nothing."""
    return (view.allowance or 0) - view.budget_left


def _plain(row: Row | None) -> list[float] | None:
    return None if row is None else list(row)


def _row(row: list[float] | None) -> Row | None:
    return None if row is None else tuple(row)
