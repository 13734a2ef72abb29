"""The policy: a causal language model, and the log-probabilities of what was sampled from it.

Shapes: B rows, T positions of a micro-batch, N action tokens of all its rows, V words, H hidden width.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import ModelConfig
from common.errors import StorageError
from common.tokenizer import WordTokenizer

CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE = "config.json", "model.safetensors", "tokenizer.json"
"""Files of a saved model, the same in a warm start, a checkpoint, and a published version."""


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
    """`[N]` entropy of that distribution in nats, without gradient."""


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


def load_model(path: Path) -> PreTrainedModel:
    """The model saved in a folder (config.json, model.safetensors), in float32.

    Raises:
        StorageError: a file is missing or unreadable, or tensors and configuration do not belong together.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise StorageError(f"there is no model at {path}: {name} is missing; run role=warmstart first")
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
    model: PreTrainedModel, ids_BT: Tensor, rows_N: Tensor, columns_N: Tensor, targets_N: Tensor,
    temperature: float,
) -> TokenLogprobs:  # fmt: skip
    """log softmax(logits / temperature) of the tokens sampled, as the engine defines it.

    Rows are filled up on the right, so that every token keeps its true position, and attention is causal, so
    that no token sees the filling: no mask is needed, and its contents do not matter. Only the hidden states
    that predict an action token meet the vocabulary.

    Args:
        model: the policy.
        ids_BT: token ids, right-padded with anything valid.
        rows_N, columns_N: where the hidden state lies that predicts each action token (one before it).
        targets_N: the action tokens.
        temperature: of the sampled distribution; logits are divided before the softmax.
    """
    backbone: Any = model.base_model
    hidden_BTH = backbone(input_ids=ids_BT, use_cache=False).last_hidden_state
    head: Any = model.get_output_embeddings()
    logits_NV = head(hidden_BTH[rows_N, columns_N]).float() / temperature
    all_NV = torch.log_softmax(logits_NV, dim=-1)
    with torch.no_grad():
        entropies_N = -(all_NV.exp() * all_NV).sum(-1)
    return TokenLogprobs(all_NV.gather(1, targets_N[:, None]).squeeze(1), entropies_N)


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
