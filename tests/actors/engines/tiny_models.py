"""Tiny random models of three architectures, and the plain forward pass the engine is compared with."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from actors.engines.base import Floats, GenerateRequest, Generation, Ids
from actors.engines.torch_engine import TorchEngine
from common.nouns import Version

VOCAB = 29
V0, V1 = Version(0, 0), Version(0, 1)


def config_of(name: str) -> PreTrainedConfig:
    if name == "gpt2":  # absolute positions, tied embeddings, fused projections
        return GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCAB, n_positions=160)
    shared: dict[str, Any] = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=160,
    )
    if name == "qwen2":  # grouped queries, biases, tied embeddings
        return Qwen2Config(**shared, num_key_value_heads=2, tie_word_embeddings=True)
    return LlamaConfig(**shared, num_key_value_heads=4)


def write_model(folder: Path, name: str = "llama", seed: int = 0) -> Path:
    """Save a random model whose distributions are far from flat; answers its folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.25)
    model.save_pretrained(folder)
    return folder


@functools.cache
def plain_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_logits(folder: Path, ids: Ids) -> torch.Tensor:
    """[n, V] logits of transformers' own forward pass over one sequence."""
    with torch.no_grad():
        logits: torch.Tensor = plain_model(folder)(
            torch.from_numpy(np.asarray(ids, dtype=np.int64))[None]
        ).logits[0]
    return logits


def plain_logprobs(folder: Path, context: Ids, ids: Ids, temperature: float = 1.0) -> torch.Tensor:
    """[k, V] log-probabilities before each of `ids`, which follow `context`."""
    logits = plain_logits(folder, np.concatenate([context, ids]))[len(context) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1)


def expected(folder: Path, context: Ids, ids: Ids, temperature: float = 1.0) -> Floats:
    """[k] log-probabilities of `ids` after `context`."""
    rows = plain_logprobs(folder, context, ids, temperature)
    return rows.gather(1, torch.from_numpy(ids.astype(np.int64))[:, None])[:, 0].numpy()


def request(session: str, context: Ids, new: int = 4, seed: int = 0, **other: Any) -> GenerateRequest:
    return GenerateRequest(session, context, new, seed, **{"temperature": 1.0, "stop_ids": (), **other})


def context_of(length: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(VOCAB, size=length, dtype=np.int32)


def same(one: Generation, other: Generation) -> bool:
    """Equal bit for bit."""
    return (
        one.ids.tobytes() == other.ids.tobytes()
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.entropies.tobytes() == other.entropies.tobytes()
        and (one.versions, one.stop_reason) == (other.versions, other.stop_reason)
    )


@contextlib.asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[TorchEngine]:
    """An engine with the folder's weights as version (0, 0)."""
    engine = TorchEngine(**{"max_batch": 16, "max_context": 128, **options})
    try:
        await engine.load_weights(V0, folder)
        yield engine
    finally:
        await engine.close()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end; a hang fails instead of stopping the suite."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout=60))


async def sampled(engine: TorchEngine, count: int) -> None:
    """Wait until the engine has sampled this many tokens."""
    while engine.counters()["sampled_tokens"] < count:
        await asyncio.sleep(0)
