"""Rows to micro-batches of bounded size. The cut and the layout change the speed, never the gradient.

    rows ─┬─ layout "rows": one branch a line, lines of similar length together, filled up on the right
          └─ layout "tree": each tree packed, several end to end in one line; rows that share next to
             nothing go one a line as above, so that packing is never slower

Packed trees are laid end to end and not one a line: nothing is filling then, whatever the trees' sizes, and
attention skips what lies outside a tree either way (`learner.attention`).

Shapes: B lines, T tokens of a line, N trained tokens (each once), M pairs of a trained token and a branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.layout import fill
from learner.packing import MIN_SHARING, Packed, groups, pack_line, token_keys, trained_places
from learner.rows import Row
from learner.streams import Streams

LAYOUTS = ("rows", "tree")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass reads, and what its tokens are paid."""

    ids_BT: Tensor
    positions_BT: Tensor
    """Place of each token in its branch."""
    ends_BT: Tensor | None
    """The token at place q of a line sees that at place k where k <= q < ends[k]. None = plain causal lines,
    filled up on the right."""
    lines_N: Tensor
    sources_N: Tensor
    """Line and column of the hidden state that predicts the token: that of the token before it."""
    targets_N: Tensor
    behaviour_N: Tensor
    """log μ, as sampled."""
    lags_N: Tensor
    keys_N: Tensor
    """int64, one for each (tree, node, place in the node): the same token has the same key in every
    micro-batch."""
    positive_N: Tensor
    """Σ over the token's pairs of weight · max(A, 0)."""
    negative_N: Tensor
    """Σ over the token's pairs of weight · max(−A, 0)."""
    weights_N: Tensor
    """Σ over the token's pairs of weight."""
    pair_tokens_M: Tensor
    pair_branches_M: Tensor
    """Index into `branches`."""
    pair_turns_M: Tensor
    """Which turn of which branch: equal numbers are one turn of one branch. For losses of whole turns
    (`learner.streams`)."""
    pair_advantages_M: Tensor
    pair_weights_M: Tensor
    branches: tuple[int, ...]
    """Places of the rows in the list that was cut."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that go through the model, filling included."""
        return self.ids_BT.numel()

    @property
    def device(self) -> torch.device:
        return self.ids_BT.device

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on another device; itself where it is there."""
        if self.device == torch.device(device):
            return self
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    def streams(self, logprobs: Tensor, old: Tensor) -> Streams:
        """What losses and weights read.

        Args:
            logprobs: log π_θ of the trained tokens, `[N]`, with gradient.
            old: log π_old of the same, `[N]`.
        """
        return Streams(
            logprobs=logprobs,
            old=old,
            behaviour=self.behaviour_N,
            mask=torch.ones_like(self.targets_N, dtype=torch.bool),
            positive=self.positive_N,
            negative=self.negative_N,
            weights=self.weights_N,
            pair_tokens=self.pair_tokens_M,
            pair_branches=self.pair_branches_M,
            pair_turns=self.pair_turns_M,
            pair_advantages=self.pair_advantages_M,
            pair_weights=self.pair_weights_M,
            branches=len(self.branches),
        )


def micro_batches(
    rows: Sequence[Row],
    chosen: Sequence[int],
    max_tokens: int,
    layout: str = "rows",
    one_by_one: bool = False,
) -> Iterator[MicroBatch]:
    """The chosen rows, each in exactly one micro-batch.

    Args:
        rows: of a batch of trees.
        chosen: places in it.
        max_tokens: most tokens of one forward pass, filling included; a longer branch comes alone.
        layout: "rows" or "tree".
        one_by_one: one row each in the given order, so that neither filling nor neighbours touch the
            floating-point results (deterministic mode); the layout is then "rows".

    Raises:
        ValueError: there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"micro-batches are laid out as one of {', '.join(LAYOUTS)}, not {layout!r}")
    if layout == "rows" or one_by_one:
        yield from _by_rows(rows, chosen, max_tokens, one_by_one)
        return
    found = groups(rows, chosen, max_tokens)
    shared = [group for group in found if group.sharing >= MIN_SHARING]
    alone = [place for group in found if group.sharing < MIN_SHARING for place in group.places]
    for line in fill([group.layout.length for group in shared], max_tokens):
        yield of_packed(pack_line(rows, [shared[index] for index in line]))
    yield from _by_rows(rows, alone, max_tokens)


def _by_rows(
    rows: Sequence[Row], chosen: Sequence[int], max_tokens: int, one_by_one: bool = False
) -> Iterator[MicroBatch]:
    for part in cut([rows[place].length for place in chosen], max_tokens, one_by_one):
        yield of_rows(rows, [chosen[index] for index in part])


def cut(lengths: Sequence[int], max_tokens: int, one_by_one: bool = False) -> list[list[int]]:
    """Indices of rows by micro-batch: similar lengths together, each at most `max_tokens` when padded.

    A row longer than `max_tokens` comes alone. `one_by_one` keeps the given order with one row each.
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


def of_rows(rows: Sequence[Row], chosen: Sequence[int], padding_id: int = 0) -> MicroBatch:
    """Rows `chosen`, one a line: pairs are tokens. A row's last token is only a target, never an input."""
    ids = filled_up_ids([rows[place] for place in chosen], padding_id)
    places = [trained_places(rows[place]) for place in chosen]

    def stream(name: str) -> np.ndarray:
        values = [getattr(rows[place], name)[at] for place, at in zip(chosen, places, strict=True)]
        return np.concatenate(values)

    lines = np.repeat(np.arange(len(chosen)), [len(at) for at in places])
    _, turns = np.unique(np.stack([lines, stream("nodes")]), axis=1, return_inverse=True)
    advantages, weights = stream("advantages"), stream("weights")
    return _tensors(
        ids_BT=ids,
        positions_BT=np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy(),
        lines_N=lines,
        sources_N=np.concatenate(places) - 1,
        targets_N=stream("ids"),
        behaviour_N=stream("behaviour"),
        lags_N=stream("lags"),
        keys_N=np.concatenate(
            [token_keys(rows[place])[at] for place, at in zip(chosen, places, strict=True)]
        ),
        positive_N=weights * np.maximum(advantages, 0),
        negative_N=weights * np.maximum(-advantages, 0),
        weights_N=weights,
        pair_tokens_M=np.arange(len(lines)),
        pair_branches_M=lines,
        pair_turns_M=turns.reshape(-1),
        pair_advantages_M=advantages,
        pair_weights_M=weights,
        ends=None,
        branches=tuple(chosen),
    )


def filled_up_ids(rows: Sequence[Row], padding_id: int = 0) -> np.ndarray:
    """Input tokens of rows, one a line, filled up on the right, `[B, T]`: all of a row but its last."""
    ids = np.full((len(rows), max(row.length for row in rows) - 1), padding_id, np.int64)
    for line, row in enumerate(rows):
        ids[line, : row.length - 1] = row.ids[:-1]
    return ids


def of_packed(packed: Packed) -> MicroBatch:
    """Packed trees as the one line of a micro-batch."""
    advantages, weights = packed.pair_advantages, packed.pair_weights

    def summed(pair_values: np.ndarray) -> np.ndarray:
        # In double precision: the order of the branches leaves no trace.
        totals = np.bincount(packed.pair_tokens, weights=pair_values, minlength=len(packed.targets))
        return totals.astype(np.float32)

    return _tensors(
        ids_BT=packed.ids[None],
        positions_BT=packed.positions[None],
        lines_N=np.zeros(len(packed.targets), np.int64),
        sources_N=packed.sources,
        targets_N=packed.targets,
        behaviour_N=packed.behaviour,
        lags_N=packed.lags,
        keys_N=packed.keys,
        positive_N=summed(weights * np.maximum(advantages, 0)),
        negative_N=summed(weights * np.maximum(-advantages, 0)),
        weights_N=summed(weights),
        pair_tokens_M=packed.pair_tokens,
        pair_branches_M=packed.pair_branches,
        pair_turns_M=packed.pair_turns,
        pair_advantages_M=advantages,
        pair_weights_M=weights,
        ends=packed.ends[None],
        branches=packed.branches,
    )


def _tensors(ends: np.ndarray | None, branches: tuple[int, ...], **arrays: np.ndarray) -> MicroBatch:
    return MicroBatch(
        ends_BT=None if ends is None else torch.from_numpy(ends),
        branches=branches,
        **{name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()},
    )
