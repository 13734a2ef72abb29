"""Which models can be packed: those whose layers know of other tokens by attention alone.

A packed tree is one line of tokens with a mask. A layer that mixes neighbours of the line by other means (a
convolution, a recurrence, a window counted in places) would mix branches, silently; so would positions that
are counted by place and not by branch. Such models are trained branch by branch (`learner.packing=rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from common.errors import ConfigError

ROTARY_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on the longest position of the call, so that what is packed
together would matter."""


class CannotPack(ConfigError):
    """A model whose architecture cannot take packed trees."""


def check_packable(model: PreTrainedModel) -> None:
    """Refuse a model that packing would train wrongly.

    Raises:
        CannotPack: the sentence names what stands in the way and the remedy.
    """
    reason = next(_reasons(model), None)
    if reason is not None:
        kind = getattr(model.config, "model_type", type(model).__name__)
        raise CannotPack(
            f"trees cannot be packed for a {kind} model, which has {reason}; set learner.packing=rows"
        )


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config: Any = model.config
    yield from _of_layers(config)
    yield from _of_positions(config)
    if getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True):
        yield "attention in both directions"
    if getattr(config, "is_encoder_decoder", False):
        yield "an encoder beside the decoder"
    if getattr(config, "attn_logit_softcapping", None):
        yield "soft-capped attention scores (attn_logit_softcapping)"
    if any(name.rpartition(".")[2] in ("sinks", "sink") for name, _ in model.named_parameters()):
        yield "attention sinks"
    if getattr(model, "_is_stateful", False):
        yield "a state that it carries along the line"
    if not getattr(model, "_supports_attention_backend", False):
        yield "an attention of its own instead of transformers' interface"


def _of_layers(config: Any) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    for kind in kinds or ():
        if kind not in ("full_attention", "attention"):
            yield f"layers of the kind {kind}"
    window = getattr(config, "sliding_window", None)
    if kinds is None and window is not None and getattr(config, "use_sliding_window", True):
        yield f"a sliding window of {window} tokens"
    if getattr(config, "attention_chunk_size", None):
        yield "attention within chunks (attention_chunk_size)"


def _of_positions(config: Any) -> Iterator[str]:
    rotary = getattr(config, "rope_parameters", None)
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        yield "positions by ALiBi"
    elif not rotary:
        yield "positions other than rotary embeddings"
    elif "mrope_section" in rotary:
        yield "positions in several dimensions (mrope_section)"
    elif rotary.get("rope_type") in ROTARY_BY_LENGTH:
        yield f"rotary embeddings that depend on the length of the call (rope_type={rotary['rope_type']})"
