"""What a checkpoint knows beside tensors: where the run stands, which trees are inside, random states."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgpack
import msgspec
import numpy as np
import torch
from msgspec import Meta

from common.nouns import Count, Version

MAX_RANGES = 1 << 20


class RandomStates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The process-wide generators. Training draws by derived seeds and needs none of them; a loss or
    a model of the user's might."""

    python: list[int]
    python_gauss: float | None
    numpy: bytes
    numpy_at: int
    numpy_has_gauss: int
    numpy_gauss: float
    torch: bytes


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What made a checkpoint. All is empty in checkpoints of format 1."""

    config: dict[str, Any] = {}
    """The resolved settings, by section."""
    packages: dict[str, str] = {}
    """Versions of what computes, by name."""
    commit: str = ""
    """Of the sources, where they are a git checkout."""
    mlflow_run: str = ""
    """Where the run is recorded, once it is."""
    run: str = ""
    """`RunDir.born` of the run; empty in checkpoints made before this was kept."""


class RunState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands.

    There is no cursor into a data set: a tree's number is its task, and the allocator hands numbers out. What
    stands for one is the trees inside, and `highest` of them. Nor is there the allocator's place: it keeps
    its own journal and snapshots, with half-grown trees and the success predictor, and may be ahead of any
    checkpoint. What ties the two is the learner's hello: its version says which updates survive, the
    allocator delivers again what it has not heard to be inside, and is told of trees that are.
    """

    lineage: Count
    step: Count
    trained: Annotated[list[tuple[int, int]], Meta(max_length=MAX_RANGES)]
    """Trees inside the weights, as ascending ranges (first, last)."""
    config_hash: str
    random: RandomStates
    resumed: Annotated[list[Count], Meta(max_length=MAX_RANGES)] = []
    """Step at which each lineage up to this one resumed (`common.staleness.policy_lag`); empty in checkpoints
    made before this was kept."""
    saved_at: float = 0.0
    """Seconds since 1970 by the learner's clock; 0 in checkpoints of format 1."""
    origin: Origin = Origin()

    @property
    def highest(self) -> int:
        """The highest number of a tree inside; −1 = there is none."""
        return self.trained[-1][1] if self.trained else -1

    @property
    def version(self) -> Version:
        return Version(lineage=self.lineage, step=self.step)


def encode_state(state: RunState) -> bytes:
    """msgpack of a state."""
    data: bytes = msgpack.packb(msgspec.to_builtins(state, builtin_types=(bytes,)))
    return data


def decode_state(data: bytes) -> RunState:
    """A state from its bytes. Raises `ValueError` when they are not one."""
    plain = msgpack.unpackb(data, strict_map_key=True, max_map_len=64, max_array_len=MAX_RANGES)
    return msgspec.convert(plain, RunState, builtin_types=(bytes,))


def to_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ascending ranges (first, last): {1, 2, 3, 7} to [(1, 3), (7, 7)]."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


def from_ranges(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The numbers that `to_ranges` was given, ascending."""
    for first, last in ranges:
        yield from range(first, last + 1)


def capture_random() -> RandomStates:
    """The states of the generators of `random`, numpy and torch."""
    _, numbers, gauss = random.getstate()
    state: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = state
    return RandomStates(
        python=list(numbers),
        python_gauss=gauss,
        numpy=np.asarray(keys, "<u4").tobytes(),
        numpy_at=int(position),
        numpy_has_gauss=int(has_gauss),
        numpy_gauss=float(cached),
        torch=torch.get_rng_state().numpy().tobytes(),
    )


def restore_random(states: RandomStates) -> None:
    """Set them. Raises `ValueError`, `TypeError` or `RuntimeError` for states of other library versions."""
    random.setstate((3, tuple(states.python), states.python_gauss))
    keys = np.frombuffer(states.numpy, np.uint32)
    np.random.set_state(("MT19937", keys, states.numpy_at, states.numpy_has_gauss, states.numpy_gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(states.torch), dtype=torch.uint8))
