"""The running batch: continuous batching with one forward pass for all rows at each step.

    enqueue ─▶ waiting ─▶ admit (slot, prefix) ─▶ active ─▶ step ─▶ answers
                                                    ▲          │
                                                    └──────────┘ turns that are not finished

A step feeds every active row the tokens its slot has not computed and samples the next token of every
turn. Prefill, decoding and the recomputation after an update of the weights are therefore one thing: a
swap voids all caches, and the next step computes what it finds missing. No threads and no clocks here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from actors.engines import sampling
from actors.engines.base import StopReason
from actors.engines.jobs import Describe, Job, Reply, Score, Swap, Turn
from actors.engines.packed_attention import Positions, plan_step
from actors.engines.packed_model import PackedModel
from actors.engines.slot_cache import SEARCH_WORTH, SlotCache
from common.errors import EngineError
from common.nouns import Version

STEP_TOKENS = 8192
"""Most new tokens of one step with several rows: bounds the memory of a step after an update of the
weights, when every row computes all of its tokens. A single longer row goes alone."""


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How rows are batched; see `TorchEngine` for what the values mean to a user."""

    max_batch: int
    num_slots: int
    max_context: int
    greedy: bool
    deterministic: bool


@dataclass(slots=True)
class Totals:
    """Counted since the start."""

    prefill_tokens: int = 0
    """Computed tokens that were not sampled in the turn at hand, recomputed ones included."""
    sampled_tokens: int = 0
    reused_tokens: int = 0
    """Context tokens taken from a cache instead of being computed."""
    steps: int = 0
    rows: int = 0
    """Summed over steps."""
    busy_s: float = 0.0


class Batch:
    """Rows, slots and weights; `answers` collects what is to be delivered."""

    def __init__(self, options: BatchOptions) -> None:
        self.version: Version | None = None
        self.totals = Totals()
        self.cache = SlotCache(options.num_slots, options.max_context)
        self.waiting: deque[Job | Swap] = deque()
        self.active: list[Job] = []
        self.answers: list[tuple[Reply, Any]] = []
        self._options = options
        self._model: PackedModel | None = None
        self._turns: dict[str, Turn] = {}

    @property
    def idle(self) -> bool:
        """Nothing to do until somebody asks."""
        return not self.active and not self.waiting

    def enqueue(self, job: Job | Swap) -> None:
        """Add to the waiting jobs; a second turn of a session is refused.

        Weights do not wait, except in deterministic mode, where a turn belongs to one version.
        """
        if isinstance(job, Swap) and not self._options.deterministic:
            self._swap(job)
            return
        if isinstance(job, Turn):
            session = job.request.session
            if session in self._turns:
                error = EngineError(f"session {session} has a turn running; one at a time")
                self.answers.append((job.reply, error))
                return
            self._turns[session] = job
        self.waiting.append(job)

    def abort(self, session: str, only: Turn | None = None) -> None:
        """End a session's turn, waiting or active; with `only`, if it is this one."""
        turn = self._turns.get(session)
        if turn is None or (only is not None and turn is not only):
            return
        if turn.slot < 0:
            self.waiting.remove(turn)
        self._finish(turn, turn.result(StopReason.ABORTED))

    def release(self, session: str) -> None:
        """Abort a session's turn and forget its slot."""
        self.abort(session)
        self.cache.release(session)

    def _swap(self, swap: Swap) -> None:
        swap.model.assign(swap.tensors)
        self._model, self.version = swap.model, swap.version
        self.cache.forget_all()
        self.answers.append((swap.reply, None))

    def admit(self) -> None:
        """Move jobs into the batch while there is room, in order of arrival where slots allow."""
        held: deque[Job | Swap] = deque()
        leaders: set[bytes] = set()
        while self.waiting and len(self.active) < self._options.max_batch:
            job = self.waiting.popleft()
            if isinstance(job, Swap):
                self._swap(job)
            elif not self._start(job, leaders):
                held.append(job)
        held.extend(self.waiting)
        self.waiting = held

    def _start(self, job: Job, leaders: set[bytes]) -> bool:
        """Seat a job; False when it must wait for a slot, or for the leader that computes its prefix."""
        assert self._model is not None, "jobs are refused before the first weights"
        slot = self.cache.acquire(job.session)
        if slot is None:
            return False
        reusable = len(job.tokens) - job.num_outputs
        store = None if self._options.deterministic else self._model.store
        kept = self.cache.seat(slot, job.tokens, reusable, store)
        if store is not None and reusable - kept >= SEARCH_WORTH:
            prefix = job.tokens[:reusable].tobytes()
            if prefix in leaders:
                self.cache.settle(slot)
                return False
            leaders.add(prefix)
        job.slot, job.total = slot, len(job.tokens)
        self.totals.reused_tokens += kept
        self.active.append(job)
        return True

    def _finish(self, job: Job, answer: object) -> None:
        if job.slot >= 0:
            self.active.remove(job)
            self.cache.settle(job.slot)
        if isinstance(job, Turn):
            del self._turns[job.request.session]
        self.answers.append((job.reply, answer))

    # ---------------------------------------------------------------------------------- one step

    def step(self) -> None:
        """Advance every active row by one token (as far as `STEP_TOKENS` allows)."""
        assert self._model is not None, "jobs are refused before the first weights"
        jobs, slots, starts, totals = self._chosen()
        plan = plan_step(self._model.store, self.cache.tokens, slots, starts, totals)
        jobs = [jobs[i] for i in plan.order.tolist()]
        counts = np.fromiter((job.num_outputs for job in jobs), np.int64, len(jobs))
        first = np.cumsum(counts) - counts  # the first output row of each job
        outputs = np.repeat(plan.ends - counts - first, counts) + np.arange(counts.sum())
        logits = self._model.forward(plan, outputs)
        self.cache.cached[slots] = totals
        self._count(jobs, int(plan.ends[-1]))
        rows = first.tolist()
        turns = [(job, row) for job, row in zip(jobs, rows, strict=True) if isinstance(job, Turn)]
        if len(turns) < len(jobs):
            self._answer_probes(jobs, rows, logits)
        if turns:
            chosen = logits if len(turns) == len(jobs) else logits[[row for _, row in turns]]
            self._sample([turn for turn, _ in turns], chosen)

    def _chosen(self) -> tuple[list[Job], Positions, Positions, Positions]:
        """The rows of this step in order of arrival, with slots, first and last tokens to compute."""
        jobs = self.active
        slots = np.fromiter((job.slot for job in jobs), np.int64, len(jobs))
        totals = np.fromiter((job.total for job in jobs), np.int64, len(jobs))
        starts = self.cache.cached[slots]
        counts = totals - starts
        if counts.sum() <= STEP_TOKENS:
            return jobs, slots, starts, totals
        picked, left = [0], STEP_TOKENS - int(counts[0])  # the first always moves: each row's time comes
        for index, count in enumerate(counts[1:].tolist(), start=1):
            if count <= left:
                picked.append(index)
                left -= count
        return [jobs[i] for i in picked], slots[picked], starts[picked], totals[picked]

    def _count(self, jobs: list[Job], computed: int) -> None:
        # A row that goes on inside its turn feeds the one token it sampled last: that is no prefill.
        decoding = sum(1 for job in jobs if isinstance(job, Turn) and job.ids)
        self.totals.prefill_tokens += max(0, computed - decoding)
        self.totals.steps += 1
        self.totals.rows += len(jobs)

    def _answer_probes(self, jobs: list[Job], rows: list[int], logits: torch.Tensor) -> None:
        for job, row in zip(jobs, rows, strict=True):
            if isinstance(job, Score):
                logprobs = torch.log_softmax(logits[row : row + job.num_outputs].float(), dim=-1)
                targets = torch.from_numpy(job.targets.astype(np.int64))[:, None]
                self._finish(job, logprobs.gather(1, targets)[:, 0].numpy())
        described = [(job, row) for job, row in zip(jobs, rows, strict=True) if isinstance(job, Describe)]
        if described:
            assert self._model is not None, "jobs are refused before the first weights"
            vectors = self._model.project([row for _, row in described])
            for (job, _), vector in zip(described, vectors, strict=True):
                self._finish(job, vector.copy())

    def _sample(self, turns: list[Turn], logits: torch.Tensor) -> None:
        """Draw the next token of each turn from its row of `logits` [B, V]; end those that are done."""
        assert self.version is not None, "jobs are refused before the first weights"
        if self._options.greedy:
            ids, logprobs, entropies = sampling.take_best(logits)
        else:
            size = len(turns)
            ids, logprobs, entropies = sampling.draw(
                logits,
                np.fromiter((turn.request.temperature for turn in turns), np.float32, size),
                sampling.uniforms(
                    np.fromiter((turn.request.seed for turn in turns), np.uint64, size),
                    np.fromiter((len(turn.ids) for turn in turns), np.uint64, size),
                ),
            )
        self.totals.sampled_tokens += len(turns)
        healthy = np.isfinite(logprobs).tolist()
        drawn = zip(turns, ids.tolist(), logprobs.tolist(), entropies.tolist(), healthy, strict=True)
        for turn, token, logprob, entropy, sound in drawn:
            if not sound:
                error = EngineError(f"session {turn.session}: logits are not finite under {self.version}")
                self._finish(turn, error)
                continue
            self.cache.tokens[turn.slot, turn.total] = token
            turn.total += 1
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            turn.entropies.append(entropy)
            turn.versions.append(self.version)
            if token in turn.request.stop_ids:
                self._finish(turn, turn.result(StopReason.STOP))
            elif len(turn.ids) == turn.request.max_new_tokens:
                self._finish(turn, turn.result(StopReason.LENGTH))
