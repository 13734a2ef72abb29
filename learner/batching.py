"""Rows to micro-batches: padded tensors of bounded size. The cut changes the speed, never the gradient.

Shapes: B rows, T positions, N trained tokens of all rows of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from learner.rows import Row


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Packed tensors of some rows."""

    rows: tuple[int, ...]
    """Which rows, by their place in the list that was cut."""
    ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    """Position of the hidden state that predicts the token: one before it."""
    targets_N: Tensor
    behaviour_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    lags_N: Tensor

    @property
    def padded_tokens(self) -> int:
        return self.ids_BT.numel()


def cut(lengths: Sequence[int], max_tokens: int, one_by_one: bool = False) -> list[list[int]]:
    """Indices of rows by micro-batch: similar lengths together, each at most `max_tokens` when padded.

    A row longer than `max_tokens` comes alone. `one_by_one` keeps the given order with one row each, so that
    no padding touches the floating-point results (deterministic mode).
    """
    if one_by_one:
        return [[index] for index in range(len(lengths))]
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        # The first row of a micro-batch is its longest.
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def pack(rows: Sequence[Row], chosen: Sequence[int], padding_id: int = 0) -> TrainBatch:
    """Rows `chosen` as padded tensors. A row's last token is only a target, never an input."""
    width = max(rows[index].length for index in chosen) - 1
    ids = np.full((len(chosen), width), padding_id, np.int64)
    for place, index in enumerate(chosen):
        ids[place, : rows[index].length - 1] = rows[index].ids[:-1]
    positions = [np.flatnonzero(rows[index].trained) for index in chosen]

    def stream(name: str) -> Tensor:
        values = [getattr(rows[index], name)[at] for index, at in zip(chosen, positions, strict=True)]
        return torch.from_numpy(np.concatenate(values))

    return TrainBatch(
        rows=tuple(chosen),
        ids_BT=torch.from_numpy(ids),
        rows_N=torch.from_numpy(np.repeat(np.arange(len(chosen)), [len(at) for at in positions])),
        columns_N=torch.from_numpy(np.concatenate(positions) - 1),
        targets_N=stream("ids"),
        behaviour_N=stream("behaviour"),
        advantages_N=stream("advantages"),
        weights_N=stream("weights"),
        lags_N=stream("lags"),
    )
