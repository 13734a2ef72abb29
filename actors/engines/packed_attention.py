"""Attention of many ragged sequences packed into one row, over a key-value store of fixed slots.

A step feeds each sequence the tokens its slot has not computed yet: one for a sequence that is
sampling, a few after an observation, all of them for a new prompt or after an update of the weights.
They are concatenated, so that every linear layer sees the real tokens and no padding:

    tokens of the step   [1, N]      row a: a5   row b: b0 b1 b2 b3   row c: c9
    keys, values         [S*C, H, D] written at slot*C + position, then read up to the longest row
    attention            in groups of rows with similar numbers of new tokens, padded inside a group

The function is registered with transformers under `NAME` and finds its plan in the keyword argument
`slot_plan`, which the models hand through to it.

Letters: S slots, C positions of a slot, H key-value heads, D head width, N new tokens, R rows of a
group, T new tokens of its longest row, L keys of its longest row, G query heads for each key head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.modeling_utils import AttentionInterface

from actors.engines.base import Ids
from common.errors import ConfigError

NAME = "treeward_slots"
"""Name of the attention function in transformers' registry."""
CHUNK_CLASSES = np.array([8, 32, 128, 512, 2048])
"""Rows are grouped by number of new tokens up to these bounds: one long prompt must not make sixty
sampling rows pay for its padding, and eight queries cost about what one costs (memory bound)."""
VIEW_DENSITY = 0.5
"""A group reads its slots in place when it fills at least this share of the range they span; else they
are copied together, which costs about as much as attending over them once more."""
CACHE_LINE_FLOATS = 16
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Attention features of some architectures that this function does not compute."""

Positions = NDArray[np.int64]


class KeyValueStore:
    """Keys and values of all layers, [S*C, H, D] each, made at a layer's first use.

    The memory is zeroed: masked values are multiplied by zero, which does not silence a NaN. It is
    committed as slots fill, so that a long `max_context` costs nothing until contexts are long.
    """

    def __init__(self, num_slots: int, max_context: int) -> None:
        self.num_slots, self.max_context = num_slots, max_context
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(
        self, index: int, key_NHD: torch.Tensor, value_NHD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, shaped after what it is about to store."""
        if index not in self._layers:
            length = self.num_slots * self.max_context
            self._layers[index] = (
                _lazy_zeros(length, *key_NHD.shape[1:]),
                _lazy_zeros(length, *value_NHD.shape[1:]),
            )
        return self._layers[index]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions [start, stop) of one slot to another."""
        src, dst = source * self.max_context, target * self.max_context
        for layer in self._layers.values():
            for store in layer:
                store[dst + start : dst + stop] = store[src + start : src + stop]


def _lazy_zeros(*shape: int) -> torch.Tensor:
    """Zeros that take memory where they are written: torch's own fills them, numpy's come from the system.

    Aligned to a cache line, as torch's allocations are.
    """
    size = int(np.prod(shape))
    raw = np.zeros(size + CACHE_LINE_FLOATS, dtype=np.float32)
    offset = -(raw.ctypes.data // raw.itemsize) % CACHE_LINE_FLOATS
    return torch.from_numpy(raw[offset : offset + size]).view(shape)


@dataclass(slots=True)
class Group:
    """Rows that attend together. `tokens` is their range in the packed row."""

    tokens: slice
    shape: tuple[int, int, int]
    """(R, T, L)"""
    rows: slice | torch.Tensor
    """Slots to read: a range in place, or indices to copy together, [R]."""
    padded: torch.Tensor | None
    """[n] where each token of the group stands in the padded [R*T] queries; None: exactly there."""
    mask: torch.Tensor
    """[R, 1, T, L] 0 or -inf"""
    wide_masks: dict[int, torch.Tensor] = field(default_factory=dict)
    """The mask repeated for G query heads, made by the first layer that needs it."""

    def mask_for(self, group_heads: int) -> torch.Tensor:
        """[R, 1, T*G, L]"""
        if group_heads == 1:
            return self.mask
        if group_heads not in self.wide_masks:
            self.wide_masks[group_heads] = self.mask.repeat_interleave(group_heads, dim=2)
        return self.wide_masks[group_heads]


@dataclass(slots=True)
class StepPlan:
    """One forward pass over the new tokens of some slots."""

    store: KeyValueStore
    order: Positions
    """[rows] the packed order of the rows given to `plan_step`."""
    ids: torch.Tensor
    """[1, N]"""
    positions: torch.Tensor
    """[1, N] position of each token in its own sequence."""
    write_at: torch.Tensor
    """[N] where keys and values go in the store."""
    ends: Positions
    """[rows] index in the packed row just after each row's last token, in packed order."""
    groups: list[Group]


def plan_step(
    store: KeyValueStore, tokens_SC: Ids, slots: Positions, starts: Positions, stops: Positions
) -> StepPlan:
    """Lay out the tokens [starts, stops) of some slots, at least one for each, for one forward pass."""
    classes = np.searchsorted(CHUNK_CLASSES, stops - starts)
    order = np.lexsort((slots, classes))
    slots, starts, classes = slots[order], starts[order], classes[order]
    counts = stops[order] - starts
    ends = np.cumsum(counts)
    in_row = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
    positions = np.repeat(starts, counts) + in_row
    slot_of = np.repeat(slots, counts)
    edges = [0, *(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(slots)]
    groups = [
        _plan_group(slots[a:b], counts[a:b], int(ends[a] - counts[a]), positions, in_row)
        for a, b in itertools.pairwise(edges)
    ]
    return StepPlan(
        store=store,
        order=order,
        ids=torch.from_numpy(tokens_SC[slot_of, positions].astype(np.int64)[None]),
        positions=torch.from_numpy(positions[None]),
        write_at=torch.from_numpy(slot_of * store.max_context + positions),
        ends=ends,
        groups=groups,
    )


def _plan_group(
    slots: Positions, counts: Positions, first: int, positions: Positions, in_row: Positions
) -> Group:
    num_tokens, longest = int(counts.sum()), int(counts.max())
    own, own_in_row = positions[first : first + num_tokens], in_row[first : first + num_tokens]
    low, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
    # Idle slots in the range cost attention for nothing: acceptable for few queries only.
    in_place = span == len(slots) or (longest <= CHUNK_CLASSES[0] and len(slots) >= VIEW_DENSITY * span)
    num_rows = span if in_place else len(slots)
    row = np.repeat(slots - low if in_place else np.arange(len(slots)), counts)
    padded = row * longest + own_in_row
    # Padding queries look at position 0 alone, which every slot has: finite, and dropped afterwards.
    query_at = np.zeros(num_rows * longest, dtype=np.int64)
    query_at[padded] = own
    num_keys = int(own.max()) + 1
    visible = np.arange(num_keys) <= query_at[:, None]
    mask = np.where(visible, np.float32(0), np.float32(-np.inf)).reshape(num_rows, 1, longest, num_keys)
    return Group(
        tokens=slice(first, first + num_tokens),
        shape=(num_rows, longest, num_keys),
        rows=slice(low, low + span) if in_place else torch.from_numpy(slots),
        padded=None if num_tokens == num_rows * longest else torch.from_numpy(padded),
        mask=torch.from_numpy(mask),
    )


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    slot_plan: StepPlan | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store the new keys and values, then attend; the signature is transformers' attention interface.

    Args:
        query: [1, H*G, N, D]
        key, value: [1, H, N, D], positions already applied.

    Returns:
        [1, N, H*G, D] and no attention weights.
    """
    if slot_plan is None:
        raise ConfigError("this architecture does not pass keyword arguments on to its attention")
    _refuse_unsupported(others, slot_plan.store.max_context)
    store = slot_plan.store
    key_NHD, value_NHD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    keys, values = store.layer(module.layer_idx, key_NHD, value_NHD)  # type: ignore[arg-type]
    keys.index_copy_(0, slot_plan.write_at, key_NHD)
    values.index_copy_(0, slot_plan.write_at, value_NHD)
    query_NHD = query[0].transpose(0, 1)
    outs = [_attend(group, store, query_NHD, keys, values, scaling) for group in slot_plan.groups]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


def _refuse_unsupported(others: dict[str, Any], max_context: int) -> None:
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise ConfigError(f"the torch engine does not compute attention with {name}; use engine=vllm")
    window = others.get("sliding_window")
    if window is not None and window < max_context:
        raise ConfigError(
            f"engine.max_context must be at most the model's sliding window of {window}, got {max_context}"
        )


def _attend(
    group: Group,
    store: KeyValueStore,
    query_NHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """[n, H*G, D] for the n tokens of a group."""
    rows, longest, num_keys = group.shape
    heads, width = keys.shape[1:]
    group_heads = query_NHD.shape[1] // heads
    own = query_NHD[group.tokens]
    if group.padded is not None:
        own = own.new_zeros(rows * longest, *own.shape[1:]).index_copy_(0, group.padded, own)
    query = own.reshape(rows, longest, heads, group_heads, width).permute(0, 2, 1, 3, 4)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(rows, heads, longest * group_heads, width),
        _read(keys, store, group.rows, num_keys),
        _read(values, store, group.rows, num_keys),
        attn_mask=group.mask_for(group_heads),
        scale=scaling,
    )
    value_width = attended.shape[-1]
    attended = attended.view(rows, heads, longest, group_heads, value_width).permute(0, 2, 1, 3, 4)
    flat = attended.reshape(rows * longest, heads * group_heads, value_width)
    return flat if group.padded is None else flat.index_select(0, group.padded)


def _read(
    stored: torch.Tensor, store: KeyValueStore, rows: slice | torch.Tensor, num_keys: int
) -> torch.Tensor:
    """[R, H, L, D] the first `num_keys` positions of some slots."""
    by_slot = stored.view(store.num_slots, store.max_context, *stored.shape[1:])[:, :num_keys]
    picked = by_slot[rows] if isinstance(rows, slice) else by_slot.index_select(0, rows)
    return picked.transpose(1, 2)


AttentionInterface.register(NAME, slot_attention)
