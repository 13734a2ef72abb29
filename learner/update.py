"""One batch of trees to one new version of the weights.

    trees ─ credit ─▶ rows ─ no gradient? skipped ─▶ micro-batches ─ forward, loss, backward ─▶ AdamW step

The objective of a batch is a sum over its tokens, divided once by a constant, the number of prompts:

    L = 1/P · Σ_tokens  weight · w_behaviour · loss(log π_θ, log π_old, advantage)

so that its gradient does not depend on how rows are cut into micro-batches. Tokens too old to train and
branches without gradient stay in that denominator. With `credit=granted` and `node_weight=granted` it does
not depend on how many branches, tokens or survivors there are either: the weight and the baseline of a token
were fixed before it was sampled. Elsewhere realised numbers enter by the weight: a tree's leaves under
`credit=grpo` (1 / leaves), the branches through a token under `node_weight=once` (a mean over them) and
`leaf_share` (a sum over them).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config_learner import LearnerConfig, OptimizerConfig
from common.nouns import Tree
from common.seeds import derive_seed
from learner.batching import TrainBatch, cut, pack
from learner.credit import CREDITS
from learner.diagnostics import TokenLog, summarise
from learner.loss import LOSSES
from learner.policy import TokenLogprobs, token_logprobs
from learner.rows import Clock, Row, RowCounts, build_rows
from learner.weight import WEIGHTS

ADAM_EPSILON = 1e-8
"""PyTorch's default, as in the papers compared here."""

Proximal: TypeAlias = dict[int, Tensor]
"""log π_prox of each row's trained tokens, by the row's place in its list."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one update did."""

    counts: RowCounts
    metrics: dict[str, float]
    minibatches: int
    """Parts that the batch was cut into, over all epochs: each is one optimiser step, or skipped."""
    minibatches_skipped: int
    """Parts whose gradient was not finite: the weights moved by the other parts only, if there are any."""

    @property
    def applied(self) -> bool:
        """Whether every part was stepped on."""
        return self.minibatches_skipped == 0


def make_optimizer(model: PreTrainedModel, settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over all parameters in their order of definition."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=ADAM_EPSILON,
        weight_decay=settings.weight_decay,
    )


def warmed_up_lr(settings: OptimizerConfig, step: int) -> float:
    """Linear warm-up: update `step` (from 0) runs at lr · min(1, (step + 1) / warmup_steps)."""
    return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))


class Updater:
    """Owns the way from trees to an optimiser step. Pure but for the model and optimiser it is given."""

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.AdamW,
        settings: LearnerConfig,
        *,
        temperature: float,
        deterministic: bool = False,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self._model = model.eval()  # no dropout: the distribution is the one the engine sampled from
        self._optimizer = optimizer
        self._settings = settings
        self._temperature = temperature
        self._deterministic = deterministic
        self._credit = CREDITS[settings.credit.name]
        self._loss = LOSSES[settings.loss.name]
        self._weight = WEIGHTS[settings.weight.name]
        self.padded_tokens = 0
        """Tokens that went through forward and backward passes, filling included."""

    def update(self, trees: Sequence[Tree], clock: Clock) -> UpdateReport:
        """Train on a batch of trees in canonical order and step the optimiser.

        Args:
            trees: as delivered; sorted by id here.
            clock: the weights being updated, and which tokens are young enough.
        """
        counts = RowCounts()
        rows = self.rows(trees, clock, counts)
        kept = [row for row in rows if row.has_gradient()]
        for group in self._optimizer.param_groups:
            group["lr"] = warmed_up_lr(self._settings.optimizer, clock.current.step)
        proximal = self._proximal(kept) if self._needs_proximal_pass() else None
        log, losses, norms = TokenLog(), list[float](), list[float]()
        for epoch, chosen in self._minibatches(kept, trees, clock.current.step):
            log.moved = any(map(math.isfinite, norms))
            losses.append(
                self._accumulate(kept, chosen, proximal, clock.max_lag, log if epoch == 0 else None)
            )
            norms.append(self._step())
        metrics = {
            "loss": sum(losses) / max(1, len(losses)),
            "grad_norm": largest(norms),
            "lr": self._optimizer.param_groups[0]["lr"],
            "rows_trained": len(kept),
            "rows_without_gradient": len(rows) - len(kept),
            **summarise(log, clock.max_lag),
        }
        skipped = sum(not math.isfinite(norm) for norm in norms)
        return UpdateReport(counts, metrics, minibatches=len(norms), minibatches_skipped=skipped)

    def rows(self, trees: Iterable[Tree], clock: Clock, counts: RowCounts) -> list[Row]:
        """Rows of a batch in canonical order: by tree, then as the tree lists its continuations."""
        rows: list[Row] = []
        for tree in sorted(trees, key=lambda tree: tree.id):
            credits = self._credit(tree, self._settings.credit)
            rows += build_rows(tree, credits, self._settings.node_weight, clock, counts)
        return rows

    def _needs_proximal_pass(self) -> bool:
        """With one optimiser step a batch the proximal policy is the current one: its log-probabilities are
        those of the same forward pass, detached."""
        loss = self._settings.loss
        return self._weight.proximal and loss.epochs * loss.minibatches > 1

    def _minibatches(
        self, kept: Sequence[Row], trees: Sequence[Tree], step: int
    ) -> Iterable[tuple[int, list[int]]]:
        """Epoch and rows of each optimiser step: all of them, or those of a seeded part of the trees.

        A part without trees is none: a step on nothing would be momentum alone.
        """
        loss = self._settings.loss
        for epoch in range(loss.epochs):
            order = sorted(tree.id for tree in trees)
            if loss.minibatches > 1:
                random.Random(derive_seed("minibatches", self._seed, step, epoch)).shuffle(order)
            for part in range(min(loss.minibatches, len(order))):
                chosen = set(order[part :: loss.minibatches])
                yield epoch, [place for place, row in enumerate(kept) if row.tree in chosen]

    def _cut(self, rows: Sequence[Row], chosen: Sequence[int]) -> Iterable[TrainBatch]:
        lengths = [rows[place].length for place in chosen]
        for part in cut(lengths, self._settings.micro_batch_tokens, one_by_one=self._deterministic):
            yield pack(rows, [chosen[index] for index in part])

    def _forward(self, batch: TrainBatch) -> TokenLogprobs:
        self.padded_tokens += batch.padded_tokens
        return token_logprobs(
            self._model, batch.ids_BT, batch.rows_N, batch.columns_N, batch.targets_N, self._temperature
        )

    def _proximal(self, rows: Sequence[Row]) -> Proximal:
        """log π under the weights at the start of the batch."""
        found: Proximal = {}
        with torch.no_grad():
            for batch in self._cut(rows, range(len(rows))):
                sizes = [int(rows[place].trained.sum()) for place in batch.rows]
                parts = self._forward(batch).logprobs.split(sizes)
                found.update(zip(batch.rows, parts, strict=True))
        return found

    def _accumulate(
        self, rows: Sequence[Row], chosen: Sequence[int], proximal: Proximal | None, max_lag: int,
        log: TokenLog | None,
    ) -> float:  # fmt: skip
        """Gradients of the objective over some rows; returns its value."""
        self._optimizer.zero_grad(set_to_none=False)
        prompts = self._settings.batch_trees / self._settings.loss.minibatches
        total = 0.0
        for batch in self._cut(rows, chosen):
            if int(batch.lags_N.max()) > max_lag:
                raise RuntimeError(f"a token older than K = {max_lag} updates reached the loss")
            policy = self._forward(batch)
            if proximal is None:
                prox_N = policy.logprobs.detach()
            else:
                prox_N = torch.cat([proximal[place] for place in batch.rows])
            mask_N = torch.ones_like(batch.targets_N, dtype=torch.bool)
            old_N = prox_N if self._weight.proximal else batch.behaviour_N
            weight = self._weight.weigh(prox_N, batch.behaviour_N, mask_N, self._settings.weight)
            loss = self._loss(policy.logprobs, old_N, batch.advantages_N, mask_N, self._settings.loss)
            objective = (batch.weights_N * weight.weight * loss.loss).sum() / prompts
            objective.backward()
            total += float(objective.detach())
            if log is not None:
                log.add(batch, policy, loss, weight)
        return total

    def _step(self) -> float:
        """Clip, then step; returns the norm before clipping. Nothing is assigned when it is not finite.

        Trees without any gradient still step: their gradient is an honest zero, and momentum goes on.
        """
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.optimizer.grad_clip)
        )
        if math.isfinite(norm):
            self._optimizer.step()
        return norm


def largest(norms: Sequence[float]) -> float:
    """The greatest norm, 0 of none; NaN if any is not finite (`max` hides a NaN that is not first)."""
    return max(norms, default=0.0) if all(map(math.isfinite, norms)) else math.nan
