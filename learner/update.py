"""One batch of trees to one new version of the weights.

    trees ─ credit ─▶ rows ─ no gradient? skipped ─▶ micro-batches ─ forward, objective, backward ─▶ step

The objective of a batch is a sum over its tokens, divided once by a constant, the number of prompts:

    L = 1/P · Σ_tokens [ w_behaviour · loss(log π_θ, log π_old, coefficients) + KL − entropy ]

so that its gradient does not depend on how rows are cut into micro-batches, packed into trees, or shared out
among ranks. Tokens too old to train and branches without gradient stay in that denominator. With
`credit=granted` and `node_weight=granted` it does not depend on how many branches, tokens or survivors there
are either: the weight and the baseline of a token were fixed before it was sampled. Elsewhere realised
numbers enter by the weight: a tree's leaves under `credit=grpo` (1 / leaves), the branches through a token
under `node_weight=once` (a mean over them) and `leaf_share` (a sum over them).

Every rank runs this on the same trees; each takes its share of the micro-batches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.config_learner import LearnerConfig, OptimizerConfig
from common.nouns import Tree
from common.seeds import derive_seed
from learner.backend.alone import Alone
from learner.backend.base import Backend
from learner.batching import MicroBatch, micro_batches
from learner.credit import CREDITS
from learner.crediting import Crediting
from learner.critic import CRITIC_FILE, Critic
from learner.diagnostics import TokenLog, summarise
from learner.objective import Objective
from learner.passes import KnownTokens, known_tokens
from learner.policy import TokenLogprobs, token_logprobs
from learner.reference import Reference
from learner.rows import Clock, Row, RowCounts


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


def warmed_up_lr(settings: OptimizerConfig, step: int) -> float:
    """Linear warm-up: update `step` (from 0) runs at lr · min(1, (step + 1) / warmup_steps)."""
    return settings.lr * min(1.0, (step + 1) / max(1, settings.warmup_steps))


class Gathers(Protocol):
    """What the update asks of a group (`learner.backend.group.Group`, or `alone.Alone`)."""

    def sum(self, values: Tensor) -> Tensor:
        """Σ over ranks, in place. Collective."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Everybody's bytes, on rank 0; nothing elsewhere. Collective."""
        ...


class Updater:
    """Owns the way from trees to an optimiser step. Pure but for the backend it is given.

    Args:
        backend: the model, its optimiser, and who else trains it.
        settings: of the learner.
        temperature: of the distribution that was sampled from.
        deterministic: one row to a micro-batch, no packing.
        seed: of the run; minibatches are drawn by it.
        reference: the frozen model of the KL term, where its coefficient is not 0.
        group: all ranks, where there are several: their diagnostics are put together.
    """

    def __init__(
        self,
        backend: Backend,
        settings: LearnerConfig,
        *,
        temperature: float,
        deterministic: bool = False,
        seed: int = 0,
        reference: Reference[MicroBatch] | None = None,
        group: Gathers | None = None,
    ) -> None:
        self._group = group or Alone(backend.device)
        self._backend, self._settings, self._seed = backend, settings, seed
        backend.model.eval()  # no dropout: the distribution is the one the engine sampled from
        self._temperature = temperature
        self._deterministic = deterministic
        self._layout = "rows" if deterministic else settings.packing.value
        self._objective = Objective(settings)
        self._reference = reference
        if self._objective.needs_reference and reference is None:
            raise ValueError("a KL coefficient needs a reference model")
        self._critic: Critic | None = None
        if CREDITS[settings.credit.name].needs_values(settings.credit):
            self._critic = Critic(backend, settings.credit.critic_lr, settings.micro_batch_tokens)
        self._crediting = Crediting(
            settings, self._objective.trains_unpaid, self._every, self._logprobs, self._critic
        )
        self.computed_tokens = 0
        """Tokens that went through forward and backward passes, filling included."""

    def update(self, trees: Sequence[Tree], clock: Clock) -> UpdateReport:
        """Train on a batch of trees in canonical order and step the optimiser.

        Args:
            trees: as delivered; sorted by id here. The same on every rank.
            clock: the weights being updated, and which tokens are young enough.
        """
        counts = RowCounts()
        rows = self.rows(trees, clock, counts)
        kept = [row for row in rows if row.has_gradient() or self._objective.trains_unpaid]
        lr = warmed_up_lr(self._settings.optimizer, clock.current.step)
        proximal: KnownTokens | None = None
        if self._objective.needs_proximal_pass:  # log π under the weights at the start of the batch
            proximal = known_tokens(self._every(kept), self._logprobs)
        log, losses, norms = TokenLog(), list[float](), list[float]()
        for epoch, chosen in self._minibatches(kept, trees, clock.current.step):
            log.moved = any(map(math.isfinite, norms))
            first = log if epoch == 0 else None
            losses.append(self._accumulate(kept, chosen, proximal, clock.max_lag, first))
            norms.append(self._backend.step(lr))
        log, losses = self._together(log, losses)
        metrics = {
            "loss": sum(losses) / max(1, len(losses)),
            "grad_norm": largest(norms),
            "lr": lr,
            "rows_trained": len(kept),
            "rows_without_gradient": len(rows) - len(kept),
            **self._crediting.metrics,
            **summarise(log, clock.max_lag),
        }
        skipped = sum(not math.isfinite(norm) for norm in norms)
        return UpdateReport(counts, metrics, minibatches=len(norms), minibatches_skipped=skipped)

    def rows(self, trees: Iterable[Tree], clock: Clock, counts: RowCounts) -> list[Row]:
        """Rows of a batch in canonical order (`learner.crediting`)."""
        return self._crediting.rows(trees, clock, counts)

    def state_files(self) -> dict[str, bytes]:
        """What a checkpoint must hold beside the backend's files; the same on every rank."""
        return {} if self._critic is None else {CRITIC_FILE: self._critic.state_file()}

    def load_state(self, files: Mapping[str, bytes]) -> None:
        """Take back what `state_files` gave; where there is none the critic starts afresh. Raises
        `StorageError`."""
        if self._critic is not None and CRITIC_FILE in files:
            self._critic.load_state(files[CRITIC_FILE])

    def _together(self, log: TokenLog, losses: list[float]) -> tuple[TokenLog, list[float]]:
        """What all ranks saw, on rank 0; elsewhere the logs of that rank alone. Collective."""
        if self._backend.world == 1:
            return log, losses
        summed: list[float] = self._group.sum(torch.tensor(losses, dtype=torch.float64)).tolist()
        parts = self._group.gather(log.to_bytes())
        return (TokenLog.merged(parts) if parts else log), summed

    # --- passes without gradient: every rank makes all of them ----------------------------------------------

    def _every(self, rows: Sequence[Row]) -> Iterator[MicroBatch]:
        return self._cut(rows, range(len(rows)))

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self._forward(batch).logprobs

    # --- one optimiser step --------------------------------------------------------------------------------

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

    def _cut(self, rows: Sequence[Row], chosen: Sequence[int]) -> Iterator[MicroBatch]:
        limit = self._settings.micro_batch_tokens
        for batch in micro_batches(rows, chosen, limit, self._layout, one_by_one=self._deterministic):
            yield batch.to(self._backend.device)

    def _forward(self, batch: MicroBatch) -> TokenLogprobs:
        self.computed_tokens += batch.computed_tokens
        entropy_gradient = self._objective.needs_entropy_gradient
        return self._backend.run(
            lambda model: token_logprobs(model, batch, self._temperature, entropy_gradient)
        )

    def _accumulate(
        self, rows: Sequence[Row], chosen: Sequence[int], proximal: KnownTokens | None, max_lag: int,
        log: TokenLog | None,
    ) -> float:  # fmt: skip
        """Gradients of the objective over some rows; returns its value."""
        # Of one optimiser step: a batch is never cut into more parts than it has trees.
        prompts = self._settings.batch_trees / min(
            self._settings.loss.minibatches, self._settings.batch_trees
        )
        total = 0.0
        for batch in self._my_share(self._cut(rows, chosen)):
            if batch is None:
                self._backend.idle()
                continue
            if int(batch.lags_N.max()) > max_lag:
                raise RuntimeError(f"a token older than K = {max_lag} updates reached the loss")
            policy = self._forward(batch)
            prox_N = None if proximal is None else proximal.at(batch.keys_N.cpu()).to(batch.behaviour_N)
            reference_N = self._reference.logprobs(batch) if self._reference is not None else None
            parts = self._objective(batch, policy, prox_N, reference_N)
            objective = parts.total / prompts
            self._backend.backward(objective)
            total += float(objective.detach())
            if log is not None:
                log.add(batch, policy, parts)
        return total

    def _my_share(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch | None]:
        """This rank's micro-batches, one a round; None in a round that only other ranks have one for: passes
        of sharded weights are collective, so that every rank takes part in every round."""
        rank, world = self._backend.rank, self._backend.world
        mine: MicroBatch | None = None
        place = -1
        for place, batch in enumerate(batches):
            if place % world == rank:
                mine = batch
            if place % world == world - 1:
                yield mine
                mine = None
        if place % world != world - 1:
            yield mine


def largest(norms: Sequence[float]) -> float:
    """The greatest norm, 0 of none; NaN if any is not finite (`max` hides a NaN that is not first)."""
    return max(norms, default=0.0) if all(map(math.isfinite, norms)) else math.nan
