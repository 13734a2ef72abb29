"""Who sees whom in a micro-batch, said to the model in the way that is fastest where it runs.

    CPU    the line is cut into chunks (`learner.layout.chunks`), each one SDPA call over the tokens it sees
    CUDA   FlexAttention, with a block mask made from `ends`
    rows   nothing: lines filled up on the right need no mask, and run the plain causal kernel

`ends` is the whole mask: the token at place q sees that at place k exactly where `k <= q < ends[k]`. As a
dense mask it costs T² pairs a layer however much the trees branch, and as much memory; chunks cost about what
the trees have. transformers lets one register an attention function by name and hands extra arguments of the
model call through to it; under this name, calls without such an argument do what "sdpa" does.

Shapes: B lines, T tokens, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learner.batching import MicroBatch
from learner.layout import Chunk, chunks
from learner.packable import check_packable

IMPLEMENTATION = "treeward"
"""Name under which the attention function is registered with transformers."""
BLOCK = 128
"""FlexAttention's blocks, in tokens; lines are filled up to whole ones."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------------- masks


def mask_mod(ends_BT: Tensor) -> MaskMod:
    """The rule as FlexAttention asks for it: (line, head, place q, place k) to bool."""

    def sees(line: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < ends_BT[line, k])

    return sees


def dense_mask(ends_BT: Tensor) -> Tensor:
    """The rule as SDPA takes it: bool `[B, 1, T, T]`, query by key."""
    places = torch.arange(ends_BT.shape[1], device=ends_BT.device)
    return ((places[None, :] <= places[:, None]) & (places[:, None] < ends_BT[:, None, :])).unsqueeze(1)


def block_mask(ends_BT: Tensor) -> BlockMask:
    """The rule as a block mask; on CUDA made by a compiled kernel, which never holds T² entries."""
    lines, length = ends_BT.shape
    return create_block_mask(
        mask_mod(ends_BT), B=lines, H=None, Q_LEN=length, KV_LEN=length, device=ends_BT.device,
        _compile=ends_BT.is_cuda,
    )  # fmt: skip


@dataclass(eq=False)
class ChunkPlan:
    """How one line is cut for SDPA: the same in every layer."""

    chunks: list[Chunk]
    masks: list[Tensor | None]
    """bool [queries, keys] of each chunk; None = plainly causal."""
    borders: list[int]
    """Sizes of the pieces of the line that chunks see whole or not at all."""
    seen: list[list[int]]
    """The pieces before each chunk that it sees."""
    _added: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict)

    def masks_as(self, dtype: torch.dtype) -> list[Tensor | None]:
        """The masks as numbers to add to scores, made once for all layers: 0 where seen, −∞ elsewhere."""
        if dtype not in self._added:
            self._added[dtype] = [
                None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
                for mask in self.masks
            ]
        return self._added[dtype]


def chunk_plan(ends_T: Tensor) -> ChunkPlan:
    """Cut a line on the CPU."""
    found = chunks(ends_T.numpy())
    length = len(ends_T)
    edges = sorted({0, length, *(edge for chunk in found for pair in chunk.ranges for edge in pair)})
    places = {edge: piece for piece, edge in enumerate(edges)}
    return ChunkPlan(
        chunks=found,
        masks=[_chunk_mask(ends_T, chunk) for chunk in found],
        borders=[to - since for since, to in pairwise(edges)],
        seen=[
            [piece for since, to in chunk.ranges for piece in range(places[since], places[to])]
            for chunk in found
        ],
    )


def _chunk_mask(ends_T: Tensor, chunk: Chunk) -> Tensor | None:
    if not chunk.ranges and not chunk.branched:
        return None
    parts = [torch.arange(since, to) for since, to in (*chunk.ranges, (chunk.start, chunk.stop))]
    k, q = torch.cat(parts)[None, :], torch.arange(chunk.start, chunk.stop)[:, None]
    return (k <= q) & (q < ends_T[k])


# --------------------------------------------------------------------------------------------- attention


def tree_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: Tensor | BlockMask | None, *, scaling: float | None = None, dropout: float = 0.0,
    tree: ChunkPlan | None = None, **more: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What transformers calls in every layer; see its `AttentionInterface`.

    Args:
        query, key, value: `[B, H, T, D]`; keys and values may have fewer heads, each shared by a group.
        attention_mask: a block mask, a dense mask, or None.
        tree: cuts the one line of a packed micro-batch on the CPU; then no mask is given.

    Returns:
        `[B, T, H, D]`, and no weights.
    """
    if tree is not None:
        return _by_chunks(query, key, value, tree, scaling, dropout), None
    inner: Any = flex_attention_forward if isinstance(attention_mask, BlockMask) else sdpa_attention_forward
    done = inner(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more)
    return cast(tuple[Tensor, Tensor | None], done)


def _by_chunks(
    query: Tensor, key: Tensor, value: Tensor, plan: ChunkPlan, scaling: float | None, dropout: float
) -> Tensor:
    """Pieces are split off once for all chunks, so that their gradients are joined once and not filled up
    with zeros to the whole line for every chunk."""
    groups = query.shape[1] // key.shape[1]
    key, value = (_for_all_heads(states, groups) for states in (key, value))
    sizes = [chunk.stop - chunk.start for chunk in plan.chunks]
    queries, own_keys, own_values = (states.split(sizes, dim=2) for states in (query, key, value))
    key_pieces, value_pieces = key.split(plan.borders, dim=2), value.split(plan.borders, dim=2)
    found = []
    masks = plan.masks_as(query.dtype)
    for q, own_k, own_v, mask, seen in zip(queries, own_keys, own_values, masks, plan.seen, strict=True):
        k = torch.cat([*(key_pieces[piece] for piece in seen), own_k], dim=2) if seen else own_k
        v = torch.cat([*(value_pieces[piece] for piece in seen), own_v], dim=2) if seen else own_v
        found.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


def _for_all_heads(states: Tensor, groups: int) -> Tensor:
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


AttentionInterface.register(IMPLEMENTATION, tree_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


# -------------------------------------------------------------------------------------------- model calls


def model_inputs(model: PreTrainedModel, batch: MicroBatch) -> dict[str, Any]:
    """The arguments with which a model's backbone computes a micro-batch: ids, and who sees whom.

    Places of the ids are kept: a line is filled up at its end only.

    Raises:
        ConfigError: the batch is packed and the model cannot be (`learner.packable`).
    """
    if batch.ends_BT is None:
        return {"input_ids": batch.ids_BT, "use_cache": False}
    prepare(model)
    inputs = {"input_ids": batch.ids_BT, "position_ids": batch.positions_BT, "use_cache": False}
    if batch.device.type == "cpu":
        if len(batch.ends_BT) != 1:
            raise ValueError(f"a packed micro-batch is one line, not {len(batch.ends_BT)}")
        return {**inputs, "tree": chunk_plan(batch.ends_BT[0]), "attention_mask": _no_mask(batch)}
    ids, positions, ends = filled_up(batch.ids_BT, batch.positions_BT, batch.ends_BT, BLOCK)
    return {**inputs, "input_ids": ids, "position_ids": positions, "attention_mask": block_mask(ends)}


def _no_mask(batch: MicroBatch) -> Tensor:
    """Four dimensions and nothing in them: transformers hands it on as it is, and makes no mask of its own
    out of the positions, which start again at every branch."""
    return torch.empty(1, 1, batch.ids_BT.shape[1], 0, dtype=torch.bool)


def filled_up(ids_BT: Tensor, positions_BT: Tensor, ends_BT: Tensor, multiple: int) -> tuple[Tensor, ...]:
    """Lines filled up to a multiple with tokens that see, and are seen by, themselves only."""
    length = ids_BT.shape[1]
    more = -length % multiple
    alone = torch.arange(length + 1, length + more + 1, device=ends_BT.device).expand(len(ends_BT), -1)
    filling = torch.zeros(len(ids_BT), more, dtype=ids_BT.dtype, device=ids_BT.device)
    return (
        torch.cat([ids_BT, filling], dim=1),
        torch.cat([positions_BT, filling], dim=1),
        torch.cat([ends_BT, alone], dim=1),
    )


def prepare(model: PreTrainedModel) -> None:
    """Let a model take packed micro-batches, once; plain ones compute what they did before.

    Raises:
        ConfigError: its architecture cannot be packed.
    """
    config: Any = model.config
    if config._attn_implementation != IMPLEMENTATION:
        check_packable(model)
        config._attn_implementation = IMPLEMENTATION
