"""The one interface between the expansion loop and whatever generates tokens.

Tokens in, tokens out: an engine gets every token of the context as ids and answers with ids, the
log-probabilities of the distribution it sampled from, and the weights each token was sampled under.
There is no top-p, top-k or penalty here: a learner could not recompute what they do.

    generate ─▶ Generation          sampled tokens; the only call that draws
    score    ─▶ log-probs           given tokens, temperature 1, nothing drawn
    features ─▶ vector or None      where the engine can see hidden states
    load_weights(version, folder)   taken between two tokens
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.nouns import Version

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]


class StopReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """One of the request's `stop_ids` was sampled; it is the last token."""
    LENGTH = "length"
    """`max_new_tokens` were sampled and the last of them is no stop token."""
    ABORTED = "aborted"
    """`abort` came first; the tokens sampled until then are there."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn to sample.

    Example: `GenerateRequest("tree=5/lease=2.0", np.array([7, 12, 4]), 8, seed=99, temperature=1.0,
    stop_ids=(2,))`.
    """

    session: str
    """Lease id. The engine may keep this session's key-value cache from one turn to the next."""
    context: Ids
    """[n], n >= 1: all tokens so far: the prompt, the actions, the observations."""
    max_new_tokens: int
    """Most tokens to sample, at least 1."""
    seed: int
    """Unsigned 64-bit. The draws of this turn depend on nothing else."""
    temperature: float
    """Divides the logits before the softmax; above zero."""
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the turn."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled; all arrays have one entry for each token."""

    ids: Ids
    """[k] the sampled tokens, the stop token included."""
    logprobs: Floats
    """[k] nats, of the distribution sampled from, temperature included."""
    entropies: Floats
    """[k] nats, of that same distribution."""
    versions: tuple[Version, ...]
    """[k] the weights each token was sampled under."""
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do; actors send it to the allocator."""

    kind: str
    """Short name of the engine, such as `torch`."""
    max_context: int
    """Most tokens of context and new tokens together."""
    max_batch: int
    """Most sequences advanced in one forward pass."""
    scores: bool
    """Whether `score` works."""
    features: int
    """Width of the vectors of `features`; 0 when it answers None."""
    swaps_mid_turn: bool
    """Whether new weights may land inside a turn, so that one turn may show several versions."""
    reproducible: bool
    """Whether a generation is, bit for bit, a function of weights and request alone."""


class Engine(ABC):
    """Generates, scores and describes token sequences under weights that change while it works.

    Every coroutine may raise `EngineError` (the engine died, was closed, has no weights yet, or cannot
    serve this request) and `ConfigError` (a setting that no request may have).
    """

    @property
    @abstractmethod
    def capabilities(self) -> EngineCapabilities:
        """What this engine can do; constant over its life."""

    @property
    @abstractmethod
    def version(self) -> Version | None:
        """The weights the next token will be sampled under; None before the first `load_weights`."""

    @abstractmethod
    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. One turn at a time for each session. Cancelling the call aborts the turn."""

    @abstractmethod
    async def score(self, context: Ids, targets: Ids) -> Floats:
        """Log-probabilities of given tokens; draws nothing and never enters a sampled context.

        Args:
            context: [n], n >= 1.
            targets: [m] tokens after the context.

        Returns:
            [m] nats at temperature 1, target i given the context and the targets before it.
        """

    @abstractmethod
    async def features(self, context: Ids, session: str | None = None) -> Floats | None:
        """A fixed random projection of the last hidden state at the end of `context` ([n], n >= 1).

        Args:
            session: a hint: the session whose next context begins with `context`. Its cache may be
                extended by these tokens, so that its next turn does not compute them again. The result
                is the same without it.

        Returns:
            [F] or None where the engine sees no hidden states.
        """

    @abstractmethod
    async def load_weights(self, version: Version, directory: Path) -> None:
        """Take the weights in `directory` (`config.json`, `model.safetensors`) between two tokens.

        All or nothing: raises `EngineError` naming the offending tensor and keeps the old weights.
        Turns in flight go on under the new weights from their next token.
        """

    @abstractmethod
    def release(self, session: str) -> None:
        """Forget a session's cache; a turn still running is aborted first."""

    @abstractmethod
    def abort(self, session: str) -> None:
        """End the session's running turn: its `generate` answers `ABORTED` with the tokens so far."""

    @abstractmethod
    async def close(self) -> None:
        """Stop the engine; pending and later calls raise `EngineError`. May be called twice."""

    def counters(self) -> Mapping[str, float]:
        """Totals since the start, for the tracker; empty where an engine counts nothing."""
        return {}
