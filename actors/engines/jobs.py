"""What the engine's worker is asked to do, and how it answers across threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engines.base import GenerateRequest, Generation, Ids, StopReason
from actors.engines.packed_model import PackedModel, Tensors
from common.nouns import Version


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """Where an answer goes: a future of the event loop that asked."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


def deliver(answers: Iterable[tuple[Reply, Any]]) -> None:
    """Resolve futures from the worker's thread; an exception as answer is raised where it is awaited.

    One wake-up for each event loop: waking a loop costs a system call, and a step ends many turns.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Reply, Any]]] = {}
    for answer in answers:
        by_loop.setdefault(answer[0].loop, []).append(answer)
    for loop, batch in by_loop.items():
        # A loop that is closed has nobody left who waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, batch)


def _resolve(batch: list[tuple[Reply, Any]]) -> None:
    for reply, answer in batch:
        if reply.future.done():
            continue  # cancelled by its caller
        if isinstance(answer, BaseException):
            reply.future.set_exception(answer)
        else:
            reply.future.set_result(answer)


@dataclass(slots=True, eq=False)
class Job:
    """A row of the batch."""

    reply: Reply
    session: str | None
    """Whose slot to use; None: any slot, given back afterwards."""
    tokens: Ids
    """[n] tokens to compute, as far as they are not cached."""
    num_outputs: int = 1
    """Logits are wanted after this many of the last tokens."""
    slot: int = -1
    """-1 until the job is in the batch."""
    total: int = 0
    """Tokens known in the slot: `tokens` and those sampled since."""


@dataclass(slots=True, eq=False)
class Turn(Job):
    """Sample until a stop token or the limit."""

    request: GenerateRequest = field(kw_only=True)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    def result(self, stop_reason: StopReason) -> Generation:
        """What was sampled so far."""
        return Generation(
            ids=np.array(self.ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            entropies=np.array(self.entropies, dtype=np.float32),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
        )


@dataclass(slots=True, eq=False)
class Score(Job):
    """Log-probabilities of given targets; one step."""

    targets: Ids = field(kw_only=True)


@dataclass(slots=True, eq=False)
class Describe(Job):
    """The projected hidden state after the last token; one step."""


@dataclass(frozen=True, slots=True, eq=False)
class Swap:
    """Take new weights."""

    reply: Reply
    version: Version
    model: PackedModel
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Release:
    """Forget a session."""

    session: str


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """End a session's running turn."""

    session: str
    turn: Turn | None = None
    """Only if it is this one: its caller was cancelled, and the session may have a newer turn."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker."""


Command = Job | Swap | Release | Abort | Stop
