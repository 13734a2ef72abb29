"""Worlds that exist only as draws: what a continuation yields, and how long each of its turns takes.

A world keeps no state: what a prefix is like travels in the snapshot of its last turn, as with a real
environment, and every draw is keyed on the lease's seed. Rules and predictors never read snapshots.
"""

from __future__ import annotations

import abc
import math
import struct

from common.nouns import (
    Ending,
    Lease,
    Outcome,
    RewardSource,
    TaskId,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
)
from common.seeds import derive_seed, turn_seed

ROOT_TURN = Turn(observation=b"\1\0\0\0\2\0\0\0", state_hash="root")


class World(abc.ABC):
    """What actors run leases in."""

    process_scores = False

    @abc.abstractmethod
    def root(self, task: TaskId) -> Turn:
        """The prompt."""

    @abc.abstractmethod
    def over(self, lease: Lease) -> Outcome | None:
        """The outcome of a lease that starts behind its own last turn (a retry), else None."""

    @abc.abstractmethod
    def turn(self, lease: Lease, offset: int, state: bytes | None, version: Version) -> Turn:
        """The turn at `offset`, sampled with the weights `version` from the prefix that ends in `state`."""

    @abc.abstractmethod
    def seconds(self, lease: Lease, offset: int, turn: Turn) -> float:
        """How long that turn takes, in mean turns: the fleet says what a turn's mean is."""

    def outcome(self, lease: Lease, last: Turn) -> Outcome:
        """How a continuation ended, by its last turn: that one pays."""
        return Outcome(last.reward, last.reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)


class CoinWorld(World):
    """Turns of one token, exponential times, and a fair coin at the end: the cheapest there is."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns

    def root(self, task: TaskId) -> Turn:
        return ROOT_TURN

    def over(self, lease: Lease) -> Outcome | None:
        if lease.offset < self._turns(lease):
            return None
        reward = self._reward(lease)
        return Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)

    def turn(self, lease: Lease, offset: int, state: bytes | None, version: Version) -> Turn:
        seed = turn_seed(lease.seed, offset)
        last = offset + 1 >= self._turns(lease)
        return Turn(
            action=(seed & 0xFF).to_bytes(4, "little"),
            logprobs=b"\0\0\0\0",
            entropies=struct.pack("<f", fraction(seed)),
            versions=[VersionRun(version, 1)],
            observation=b"\3\0\0\0",
            seed=seed,
            reward=self._reward(lease) if last else 0.0,
            status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
            state_hash="s",
        )

    def seconds(self, lease: Lease, offset: int, turn: Turn) -> float:
        return -math.log(1.0 - fraction(derive_seed("seconds", turn.seed, lease.id.epoch)))

    def _turns(self, lease: Lease) -> int:
        """Turns of the continuation: at least one, at most what the episode allows at that depth."""
        left = max(1, self.max_turns - (lease.depth - lease.offset))
        return 1 + lease.seed % left

    def _reward(self, lease: Lease) -> float:
        """Half of the continuations succeed."""
        return float(lease.seed >> 20 & 1)


def fraction(seed: int) -> float:
    """A seed of 63 bits as a number in [0, 1)."""
    return (seed >> 10) / (1 << 53)
