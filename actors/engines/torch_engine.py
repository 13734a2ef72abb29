"""The embedded engine: a model of transformers on the CPU, batched continuously in one thread.

Made for small models and many short turns: each turn computes only the tokens its session's cache
lacks, all rows share one forward pass a step, and linear layers see no padding (`packed_attention`).
The event loop is never blocked: the methods post to the worker's thread and await its answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from actors.engines.base import Engine, EngineCapabilities, Floats, GenerateRequest, Generation, Ids
from actors.engines.batch import BatchOptions
from actors.engines.jobs import Abort, Command, Describe, Job, Release, Reply, Score, Stop, Swap, Turn
from actors.engines.packed_model import PackedModel, Tensors
from actors.engines.worker import Worker
from common.errors import EngineError, require
from common.nouns import Version

MAX_SEED = 2**64 - 1
SLOTS_PER_ROW = 2
"""Default slots for each row of the batch: while one half generates, the other half is in environments."""


class TorchEngine(Engine):
    """See `Engine`. The architecture comes with the first weights and stays.

    Example: `engine = TorchEngine(max_context=256); await engine.load_weights(Version(0, 0), folder)`.
    """

    def __init__(
        self,
        *,
        max_batch: int = 64,
        max_context: int = 512,
        max_slots: int | None = None,
        features: int = 16,
        threads: int = 1,
        greedy: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Start the worker; it holds no model until `load_weights`.

        Args:
            max_batch: most rows of one forward pass.
            max_context: most tokens of context and new tokens together.
            max_slots: sessions whose cache is kept; default twice `max_batch`. Memory is that of their
                tokens' keys and values, committed as contexts grow.
            features: width of the vectors of `features`; 0 for none.
            threads: of torch, in the worker. More than the free cores is far slower than one.
            greedy: always take the likeliest token, for evaluation; log-probabilities are those of
                temperature 1, whatever the request's temperature.
            deterministic: one request at a time in order of arrival, each turn computed from its tokens,
                weights swapped between requests: results are a function of weights and request, bit for
                bit.
        """
        slots = max_slots if max_slots is not None else SLOTS_PER_ROW * max_batch
        require(max_batch >= 1, "engine.max_batch", "at least 1", max_batch)
        require(max_context >= 2, "engine.max_context", "at least 2", max_context)
        require(slots >= max_batch, "engine.max_slots", f"at least max_batch = {max_batch}", slots)
        require(features >= 0, "engine.features", "at least 0", features)
        require(threads >= 1, "engine.threads", "at least 1", threads)
        require(not deterministic or threads == 1, "engine.threads", "1 when deterministic", threads)
        rows, slots = (1, 1) if deterministic else (max_batch, slots)
        self._capabilities = EngineCapabilities(
            kind="torch",
            max_context=max_context,
            max_batch=rows,
            scores=True,
            features=features,
            swaps_mid_turn=not deterministic,
            reproducible=deterministic,
        )
        self._greedy, self._num_slots = greedy, slots
        self._model: PackedModel | None = None
        self._worker = Worker(BatchOptions(rows, slots, max_context, greedy, deterministic), threads)
        self._worker.start()
        # One thread for reading weights, so that loads keep their order and torch its thread limit.
        self._reader = ThreadPoolExecutor(1, "weights", torch.set_num_threads, (threads,))

    @property
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do."""
        return self._capabilities

    @property
    def version(self) -> Version | None:
        """The weights the next token will be sampled under."""
        return self._worker.version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; cancelling the call aborts it."""
        require(request.max_new_tokens >= 1, "max_new_tokens", "at least 1", request.max_new_tokens)
        require(0 <= request.seed <= MAX_SEED, "seed", "an unsigned 64-bit integer", request.seed)
        warm = request.temperature > 0 and np.isfinite(request.temperature)
        require(warm or self._greedy, "temperature", "finite and above 0", request.temperature)
        tokens = self._checked(request.context, "context", request.max_new_tokens)
        turn = Turn(_reply(), request.session, tokens, request=request)
        try:
            generation: Generation = await self._ask(turn)
        except asyncio.CancelledError:
            self._tell(Abort(request.session, turn))
            raise
        return generation

    async def score(self, context: Ids, targets: Ids) -> Floats:
        """[m] log-probabilities of `targets` after `context`, at temperature 1."""
        tokens = self._checked(context, "context", len(targets))
        if len(targets) == 0:
            return np.zeros(0, dtype=np.float32)
        wanted = self._checked(targets, "targets", 0)
        fed = np.concatenate([tokens, wanted[:-1]])
        logprobs: Floats = await self._ask(Score(_reply(), None, fed, len(wanted), targets=wanted))
        return logprobs

    async def features(self, context: Ids, session: str | None = None) -> Floats | None:
        """[F] projected last hidden state after `context`; None when the width is 0."""
        if self._capabilities.features == 0:
            return None
        tokens = self._checked(context, "context", 0)
        vector: Floats = await self._ask(Describe(_reply(), session, tokens))
        return vector

    async def load_weights(self, version: Version, directory: Path) -> None:
        """Read and check in a thread of its own, then swap between two tokens.

        Raises:
            ConfigError: the architecture cannot run here.
            EngineError: the weights do not fit; the message names the tensor.
        """
        loop = asyncio.get_running_loop()
        try:
            model, tensors = await loop.run_in_executor(self._reader, self._read, directory)
        except RuntimeError as error:
            raise EngineError(f"weights {version} were not read from {directory}: {error}") from error
        await self._ask(Swap(_reply(), version, model, tensors))
        self._model = model

    def _read(self, directory: Path) -> tuple[PackedModel, Tensors]:
        """Runs in the reader's thread."""
        model = self._model
        if model is None:
            limits = self._capabilities
            model = PackedModel(directory, self._num_slots, limits.max_context, limits.features)
        return model, model.read_weights(directory)

    def release(self, session: str) -> None:
        """Forget a session's cache."""
        self._tell(Release(session))

    def abort(self, session: str) -> None:
        """End a session's running turn."""
        self._tell(Abort(session))

    async def close(self) -> None:
        """Stop the worker and wait for its end, which fails whatever is pending."""
        self._tell(Stop())
        await asyncio.to_thread(self._worker.join)
        self._reader.shutdown(wait=False)

    def counters(self) -> Mapping[str, float]:
        """Totals since the start; `batch_mean` is rows per step."""
        totals = self._worker.totals
        return {
            "prefill_tokens": totals.prefill_tokens,
            "sampled_tokens": totals.sampled_tokens,
            "reused_tokens": totals.reused_tokens,
            "steps": totals.steps,
            "busy_s": totals.busy_s,
            "batch_mean": totals.rows / max(1, totals.steps),
        }

    async def _ask(self, command: Job | Swap) -> Any:
        self._worker.post(command)
        return await command.reply.future

    def _tell(self, command: Command) -> None:
        # An engine that has ended holds nothing that could still be aborted or released.
        with contextlib.suppress(EngineError):
            self._worker.post(command)

    def _checked(self, ids: Ids, what: str, more: int) -> Ids:
        """The ids as an array of our own; raises `EngineError` when this engine cannot take them."""
        if self._model is None:
            raise EngineError("the engine has no weights yet: call load_weights first")
        tokens = np.array(ids, dtype=np.int32)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise EngineError(f"{what} must be a non-empty list of token ids, got shape {tokens.shape}")
        limit = self._capabilities.max_context
        if len(tokens) + more > limit:
            raise EngineError(
                f"{what} of {len(tokens)} tokens and {more} more exceed engine.max_context = {limit}"
            )
        if tokens.min() < 0 or tokens.max() >= self._model.vocab_size:
            raise EngineError(f"{what} must hold ids from 0 to {self._model.vocab_size - 1}, got {tokens}")
        return tokens


def _reply() -> Reply:
    loop = asyncio.get_running_loop()
    return Reply(loop, loop.create_future())
