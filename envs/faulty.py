"""An environment that breaks on purpose, to test what is done about it (`env.faults`)."""

from __future__ import annotations

from common.errors import EnvironmentFault
from common.nouns import TaskId
from common.seeds import derive_seed
from envs.base import Environment, Step

SCALE = 1 << 63
"""Seeds are uniform below this."""


class FaultyEnvironment(Environment):
    """Behaves as `inner`, but raises at a share of its steps.

    Whether a step raises depends on (salt, seed of the step) alone. With the attempt in the salt, a retry of
    the same continuation meets other faults while all its draws stay the same.
    """

    name = "faulty"

    def __init__(self, inner: Environment, share: float, salt: str = "") -> None:
        self._inner, self._share, self._salt = inner, share, salt
        self.action_format, self.words, self.max_turns = inner.action_format, inner.words, inner.max_turns

    def reset(self, task: TaskId) -> str:
        return self._inner.reset(task)

    def step(self, action: str, seed: int) -> Step:
        """As `inner`, or raise `EnvironmentFault`: then nothing was played."""
        if derive_seed("fault", self._salt, seed) < self._share * SCALE:
            raise EnvironmentFault(f"planted fault (env.faults={self._share}) at the step with seed {seed}")
        return self._inner.step(action, seed)

    def snapshot(self) -> bytes:
        return self._inner.snapshot()

    def restore(self, snapshot: bytes) -> None:
        self._inner.restore(snapshot)

    def state_hash(self) -> str:
        return self._inner.state_hash()

    def close(self) -> None:
        self._inner.close()

    def gold_answer(self) -> str | None:
        return self._inner.gold_answer()

    def process_score(self) -> float | None:
        return self._inner.process_score()

    def expert_action(self, seed: int | None = None) -> str | None:
        return self._inner.expert_action(seed)
