"""Trees of a batch to rows: evidence where the credit asks for it, the credit, the filter, the rows.

    trees ─ passes without gradient ─▶ Evidence ─▶ credit ─▶ group filter ─▶ rows (+ every token counted)

Shapes: none; see `learner.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from common.config_learner import LearnerConfig
from common.nouns import Tree
from learner.batching import MicroBatch
from learner.contrast import contrast_metrics
from learner.credit import CREDITS, NO_EVIDENCE, BranchCredit, Evidence
from learner.critic import Critic
from learner.filters import FilterCounts, filter_group
from learner.passes import Logprobs, every_sampled_token, turn_log_ratios
from learner.rows import Clock, Row, RowCounts, build_rows

Cut = Callable[[Sequence[Row]], Iterable[MicroBatch]]


class Crediting:
    """What tokens are paid, as the settings say.

    Args:
        settings: of the learner.
        trains_unpaid: whether tokens paid exactly zero are trained all the same.
        cut: rows to micro-batches, for passes.
        logprobs: of the current weights.
        critic: where the credit has one that learns.
    """

    def __init__(
        self,
        settings: LearnerConfig,
        trains_unpaid: bool,
        cut: Cut,
        logprobs: Logprobs,
        critic: Critic | None,
    ) -> None:
        self._settings, self._trains_unpaid = settings, trains_unpaid
        self._cut, self._logprobs, self._critic = cut, logprobs, critic
        self._method = CREDITS[settings.credit.name]
        self.metrics: dict[str, float] = {}
        """Of the batch that was credited last."""

    def rows(self, trees: Iterable[Tree], clock: Clock, counts: RowCounts) -> list[Row]:
        """Rows of a batch in canonical order: by tree, then as the tree lists its continuations.

        Args:
            trees: of the batch.
            clock: the weights being updated, and which tokens are young enough.
            counts: added to in place.
        """
        ordered = sorted(trees, key=lambda tree: tree.id)
        evidence = self._evidence(ordered, clock)
        credits: dict[int, list[BranchCredit]] = {}
        filtered, rows = FilterCounts(), list[Row]()
        for tree in ordered:
            found = self._method.function(tree, self._settings.credit, evidence.get(tree.id, NO_EVIDENCE))
            credits[tree.id] = found = filter_group(tree, found, self._settings.filter, filtered)
            weight = self._settings.node_weight
            rows += build_rows(tree, found, weight, clock, counts, self._trains_unpaid)
        self.metrics = contrast_metrics(ordered, credits.values())
        if self._settings.filter.name != "none":
            self.metrics |= filtered.metrics()
        if self._critic is not None:
            self.metrics |= self._critic.learn(ordered, credits, self._settings.batch_trees)
        return rows

    def _evidence(self, trees: Sequence[Tree], clock: Clock) -> dict[int, Evidence]:
        if not self._method.needs_ratios:
            return {}
        rows = every_sampled_token(trees, clock.current)
        ratios = turn_log_ratios(self._cut(rows), self._logprobs)
        values = self._critic.values(rows) if self._critic is not None else {}
        return {tree.id: Evidence(ratios.get(tree.id, {}), values.get(tree.id, {})) for tree in trees}
