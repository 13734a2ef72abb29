"""The policy: a causal language model, and the log-probabilities of what was sampled from it.

Shapes: B lines, T tokens of a line of a micro-batch, N trained tokens of it, V words, H hidden width.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import ModelConfig
from common.errors import StorageError
from common.tokenizer import WordTokenizer
from learner.attention import model_inputs
from learner.batching import MicroBatch

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
"""Files of a saved model, the same in a warm start, a checkpoint, and a published version."""
IN_PARTS = "treeward_head_in_parts"
"""Attribute of a head: false where it must be called once a pass (`call_head_once`)."""
LOGITS_AT_ONCE = 1 << 28
"""Most logits held at a time: 1 GiB in float32, some of which the backward pass holds several times. Larger
products of tokens and words are made in parts."""


def use_threads(count: int | None = None) -> None:
    """Let torch use `count` threads; None = what OMP_NUM_THREADS says, and one where it says nothing.

    torch's own default is every core, and its threads busy-wait: two such processes on one machine starve
    each other.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    torch.set_num_threads(count or (int(said) if said.isdigit() and int(said) > 0 else 1))


class TokenLogprobs(NamedTuple):
    """Of the action tokens of a micro-batch."""

    logprobs: Tensor
    """`[N]` log π of each token in the distribution it is sampled from."""
    entropies: Tensor
    """`[N]` entropy of that distribution in nats; without gradient unless asked for."""


def build_model(settings: ModelConfig, tokenizer: WordTokenizer, seed: int) -> PreTrainedModel:
    """A fresh Llama-style model with untied embeddings; equal seeds give equal weights.

    No token id is special to it: a padding id would give its word an embedding that never learns, and
    a sampled pad is a token like any other.
    """
    config = cast(Any, LlamaConfig)(
        vocab_size=tokenizer.vocab_size,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        intermediate_size=settings.intermediate_size,
        max_position_embeddings=settings.max_context,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=tokenizer.end_id,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def check_model(path: Path) -> None:
    """Raise `StorageError` where a folder lacks a model's files."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise StorageError(f"there is no model at {path}: {name} is missing; run role=warmstart first")


def load_model(path: Path) -> PreTrainedModel:
    """The model saved in a folder (config.json, model.safetensors), in float32.

    Raises:
        StorageError: a file is missing or unreadable, or tensors and configuration do not belong together.
    """
    check_model(path)
    loader: Any = AutoModelForCausalLM
    disable_progress_bar()
    try:
        model, report = loader.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
            attn_implementation="sdpa", output_loading_info=True,
        )  # fmt: skip
    except Exception as error:  # the library raises many types for a damaged file
        raise StorageError(f"the model at {path} cannot be loaded ({error}); save it again") from error
    odd = sorted(map(str, [*report["missing_keys"], *report["unexpected_keys"], *report["mismatched_keys"]]))
    if odd:
        raise StorageError(
            f"{path / WEIGHTS_FILE} does not fit {CONFIG_FILE} beside it: {len(odd)} tensors are missing, "
            f"left over or of another shape, the first is {odd[0]}"
        )
    return cast(PreTrainedModel, model)


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, temperature: float, entropy_gradient: bool = False
) -> TokenLogprobs:
    """log softmax(logits / temperature) of the trained tokens of a micro-batch, as the engine defines it.

    Lines of rows are filled up on the right, so that every token keeps its true position, and attention is
    causal, so that no token sees the filling: no mask is needed, and its contents do not matter. Packed lines
    bring their own mask and positions (`learner.attention`). Only the hidden states that predict a trained
    token meet the vocabulary.

    Args:
        model: the policy, or an adapter around it.
        batch: where it is computed is where the model is.
        temperature: of the sampled distribution; logits are divided before the softmax.
        entropy_gradient: let the gradient through entropies.

    Raises:
        ConfigError: the batch is packed and the model cannot be.
    """
    inner = without_adapter(model)
    return logprobs_at(
        inner, model_inputs(inner, batch), batch.lines_N, batch.sources_N, batch.targets_N, temperature,
        entropy_gradient,
    )  # fmt: skip


def logprobs_at(
    model: PreTrainedModel, inputs: dict[str, Any], lines_N: Tensor, sources_N: Tensor, targets_N: Tensor,
    temperature: float, entropy_gradient: bool = False,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of some tokens, given where the hidden states lie that predict them.

    Args:
        model: without adapter.
        inputs: of its backbone.
        lines_N, sources_N: line and column of each hidden state.
        targets_N: the tokens.
        temperature: see `token_logprobs`.
        entropy_gradient: likewise.
    """
    backbone: Any = model.base_model
    hidden_BTH = backbone(**inputs).last_hidden_state
    hidden_NH = hidden_BTH[lines_N, sources_N]
    size = max(1, LOGITS_AT_ONCE // cast(Any, model.config).vocab_size)
    if len(hidden_NH) <= size or not getattr(model.get_output_embeddings(), IN_PARTS, True):
        return TokenLogprobs(*_of_hidden(model, hidden_NH, targets_N, temperature, entropy_gradient))
    # Logits are thrown away and made again in the backward pass: only one part's are held at a time.
    parts = [
        checkpoint(_of_hidden, model, hidden, targets, temperature, entropy_gradient, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(size), targets_N.split(size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return TokenLogprobs(torch.cat(logprobs), torch.cat(entropies))


def _of_hidden(
    model: PreTrainedModel, hidden_NH: Tensor, targets_N: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    all_NV = torch.log_softmax(_logits(model, hidden_NH).float() / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies_N = -(all_NV.exp() * all_NV).sum(-1)
    return all_NV.gather(1, targets_N[:, None]).squeeze(1), entropies_N


def _logits(model: PreTrainedModel, hidden_NH: Tensor) -> Tensor:
    """What the model's own forward pass makes of its last hidden states, its scale and soft cap included."""
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(hidden_NH)
    config: Any = model.config
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma 2
        logits = torch.tanh(logits / cap) * cap
    return logits


def call_head_once(model: PreTrainedModel) -> None:
    """Have the logits of a micro-batch made in one call, however many they are.

    For weights in shards: each call of a layer is collective then, and ranks have micro-batches of unequal
    size. One that made more calls than the others would wait for them in vain.
    """
    setattr(model.get_output_embeddings(), IN_PARTS, False)


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """The model inside an adapter of peft, whose layers stand in its place; any other model itself."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else cast(PreTrainedModel, unwrap())


def model_files(model: PreTrainedModel, tokenizer: WordTokenizer) -> dict[str, bytes]:
    """A model as the files that others load, by name; equal weights give equal bytes.

    Tied parameters are written once; the configuration says that they are tied.
    """
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    return {
        CONFIG_FILE: model.config.to_json_string(use_diff=False).encode(),
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
        TOKENIZER_FILE: tokenizer.to_json().encode(),
    }
