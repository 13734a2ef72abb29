"""A simulated world with a hidden success process: `benchmarks.population`, timed by `benchmarks.latencies`.

Where a prefix stands travels in its snapshot, as packed state. Policy drift: an update of the learner moves
the probit of every prompt by `drift`, so that what was learnt of a prefix fades.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from benchmarks.fleet_worlds import World
from benchmarks.population import Population, State
from common.nouns import Lease, Outcome, TaskId, Turn, TurnStatus, Version, VersionRun, floats_to_bytes
from common.seeds import derive_seed, turn_seed


class Timed(Protocol):
    """Durations by seed, in mean turns."""

    def draw(self, seed: int) -> float: ...


def pack(state: State) -> bytes:
    """A prefix as the snapshot of its last turn."""
    return msgspec.msgpack.encode(state)


_UNPACK = msgspec.msgpack.Decoder(State)


class PopulationWorld(World):
    """Prompts of `population`: the task's index is the prompt.

    Args:
        drift: probits by which one update moves every prompt.
    """

    process_scores = True

    def __init__(self, population: Population, latency: Timed, drift: float = 0.0) -> None:
        self.population = population
        self.latency = latency
        self.drift = drift

    def root(self, task: TaskId) -> Turn:
        state = self.population.root(task.index)
        seen = self.population.observables(state)
        return Turn(
            observation=(task.index & 0xFFFF).to_bytes(4, "little"),
            snapshot=pack(state),
            state_hash="r",
            features=seen.features,
        )

    def over(self, lease: Lease) -> Outcome | None:
        if lease.snapshot is None or lease.offset == 0:
            return None
        state = _UNPACK.decode(lease.snapshot)
        return None if state.success is None else self.outcome(lease, Turn(reward=float(state.success)))

    def turn(self, lease: Lease, offset: int, state: bytes | None, version: Version) -> Turn:
        return self.sample(turn_seed(lease.seed, offset), state, version)

    def sample(self, seed: int, snapshot: bytes | None, version: Version) -> Turn:
        """The turn that `seed` names, after the prefix that ends in `snapshot`, with the weights `version`.

        Raises:
            ValueError: there is no snapshot: a root of another world.
        """
        if snapshot is None:
            raise ValueError("a turn of a population needs the snapshot that its prefix ends in")
        shift = self.drift * version.step
        before = _UNPACK.decode(snapshot)
        after = self.population.step(before._replace(probit=before.probit + shift), seed)
        if after.success is None:
            after = after._replace(probit=after.probit - shift)
        seen = self.population.observables(after)
        count, over = after.tokens, after.success is not None
        return Turn(
            action=(seed & 0xFFFF).to_bytes(4, "little") * count,
            logprobs=bytes(4 * count),
            entropies=floats_to_bytes([seen.entropy] * count),
            versions=[VersionRun(version, count)],
            observation=b"\3\0\0\0",
            seed=seed,
            reward=float(bool(after.success)),
            status=TurnStatus.TERMINATED if over else TurnStatus.OPEN,
            snapshot=pack(after),
            state_hash="s",
            process_score=None if over else seen.process_score,
            features=None if over else seen.features,
        )

    def seconds(self, lease: Lease, offset: int, turn: Turn) -> float:
        seed = turn.seed if lease.id.epoch == 0 else derive_seed("again", turn.seed, lease.id.epoch)
        return self.latency.draw(seed)
