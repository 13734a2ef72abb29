"""Weights that change while the engine works, and folders it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.engines.torch_engine import TorchEngine
from common.errors import ConfigError, EngineError
from common.nouns import Version
from tests.actors.engines.tiny_models import (
    V0,
    V1,
    VOCAB,
    context_of,
    expected,
    request,
    run,
    running,
    sampled,
    write_model,
)

TOLERANCE = 1e-5
Tensors = dict[str, torch.Tensor]


def test_an_update_inside_turns_is_recorded_and_recomputed_exactly(llama: Path, other_llama: Path) -> None:
    async def scenario() -> None:
        contexts = [context_of(10 + 3 * index, index) for index in range(5)]
        async with running(llama) as engine:
            turns = [
                asyncio.create_task(engine.generate(request(f"s{index}", context, 90 - len(context))))
                for index, context in enumerate(contexts)
            ]
            await sampled(engine, 20)
            await engine.load_weights(V1, other_llama)
            assert engine.version == V1
            generations = await asyncio.gather(*turns)
        for context, generation in zip(contexts, generations, strict=True):
            assert list(generation.versions) == sorted(generation.versions)
            assert {V0, V1} == set(generation.versions)
            for version, folder in ((V0, llama), (V1, other_llama)):
                under = np.array([one == version for one in generation.versions])
                want = expected(folder, context, generation.ids)
                np.testing.assert_allclose(generation.logprobs[under], want[under], atol=TOLERANCE)

    run(scenario())


def test_an_update_between_turns_voids_every_cache(llama: Path, other_llama: Path) -> None:
    async def scenario() -> None:
        context = context_of(30)
        async with running(llama) as engine:
            await engine.generate(request("s", context))
            await engine.load_weights(V1, other_llama)
            before = engine.counters()["reused_tokens"]
            for session in ("s", "fresh"):
                later = await engine.generate(request(session, context))
                assert set(later.versions) == {V1}
                want = expected(other_llama, context, later.ids)
                np.testing.assert_allclose(later.logprobs, want, atol=TOLERANCE)
            assert engine.counters()["reused_tokens"] - before == 29  # of the turn under the new weights

    run(scenario())


def test_tied_embeddings_follow_an_update(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", "qwen2", 0)
    second = write_model(tmp_path / "b", "qwen2", 1)
    assert "lm_head.weight" not in load_file(second / "model.safetensors")

    async def scenario() -> None:
        context = context_of(15)
        async with running(first) as engine:
            await engine.load_weights(V1, second)
            generation = await engine.generate(request("s", context))
        np.testing.assert_allclose(
            generation.logprobs, expected(second, context, generation.ids), atol=TOLERANCE
        )

    run(scenario())


def test_a_tied_tensor_stored_twice_must_agree_with_itself(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a", "qwen2", 0)
    second = write_model(tmp_path / "b", "qwen2", 1)
    tensors = load_file(second / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]

    async def scenario() -> None:
        async with running(first) as engine:
            save_file({**tensors, "lm_head.weight": embeddings + 1}, second / "model.safetensors")
            with pytest.raises(EngineError, match="tied"):
                await engine.load_weights(V1, second)
            save_file({**tensors, "lm_head.weight": embeddings.clone()}, second / "model.safetensors")
            await engine.load_weights(V1, second)
            assert engine.version == V1

    run(scenario())


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda tensors: tensors.pop(NORM), f"{NORM} is missing"),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "extra is not part of the model"),
        (lambda tensors: tensors.update({NORM: torch.ones(7)}), f"{NORM} must have shape"),
        (
            lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int32)}),
            f"{NORM} must be a float",
        ),
        (lambda tensors: tensors.update({NORM: torch.full((32,), torch.nan)}), f"{NORM} must be finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_kept(
    llama: Path, other_llama: Path, tmp_path: Path, damage: Callable[[Tensors], object], said: str
) -> None:
    tensors = load_file(other_llama / "model.safetensors")
    damage(tensors)
    shutil.copy(other_llama / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")

    async def scenario() -> None:
        context = context_of(15)
        async with running(llama) as engine:
            with pytest.raises(EngineError, match=said):
                await engine.load_weights(V1, tmp_path)
            assert engine.version == V0
            generation = await engine.generate(request("s", context))
        np.testing.assert_allclose(
            generation.logprobs, expected(llama, context, generation.ids), atol=TOLERANCE
        )

    run(scenario())


def test_a_missing_torn_or_foreign_folder_is_an_engine_error(llama: Path, tmp_path: Path) -> None:
    torn = Path(shutil.copytree(llama, tmp_path / "torn"))
    content = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(content[: len(content) // 2])
    foreign = Path(shutil.copytree(llama, tmp_path / "foreign"))
    settings = json.loads((foreign / "config.json").read_text())
    (foreign / "config.json").write_text(json.dumps({**settings, "num_hidden_layers": 3}))

    async def scenario() -> None:
        async with running(llama) as engine:
            for folder, said in (
                (tmp_path / "none", "config.json"),
                (torn, "safetensors"),
                (foreign, "num_hidden_layers"),
            ):
                with pytest.raises(EngineError, match=said):
                    await engine.load_weights(V1, folder)
            assert engine.version == V0

    run(scenario())


def test_an_engine_without_weights_refuses_requests(llama: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(max_context=128)
        assert engine.version is None
        with pytest.raises(EngineError, match="load_weights"):
            await engine.generate(request("s", context_of(5)))
        await engine.load_weights(V0, llama)
        assert len((await engine.generate(request("s", context_of(5)))).ids) == 4
        await engine.close()

    run(scenario())


def test_a_model_that_the_engine_cannot_run_is_a_config_error(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    small: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=VOCAB
    )
    windowed = MistralConfig(**small, num_key_value_heads=2, sliding_window=16)
    AutoModelForCausalLM.from_config(windowed).save_pretrained(tmp_path / "windowed")
    write_model(tmp_path / "short")

    async def scenario() -> None:
        engine = TorchEngine(max_context=128)
        with pytest.raises(ConfigError, match="sliding window of 16"):
            await engine.load_weights(V0, tmp_path / "windowed")
        await engine.close()
        engine = TorchEngine(max_context=500)
        with pytest.raises(ConfigError, match="160 positions"):
            await engine.load_weights(V0, tmp_path / "short")
        await engine.close()

    run(scenario())


def test_versions_order_by_lineage_before_step() -> None:
    assert Version(0, 9) < Version(1, 0)
