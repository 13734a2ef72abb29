"""Adapters: what is trained, what is published, and that actors compute what peft does."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file

from actors.engines.torch_engine import TorchEngine
from common.config_backend import BackendConfig, LoraConfig
from common.config_learner import LearnerConfig
from common.errors import ConfigError, EngineError, StorageError
from common.nouns import Version
from learner.backend import Backend, make_backend
from learner.backend.group import open_group
from learner.lora import PolicyFiles, load_policy
from learner.policy import build_model, load_model, model_files
from learner.publish import VersionStore
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

LORA = LoraConfig(rank=2, alpha=6.0, targets=["q_proj", "v_proj", "down_proj"])
IDS = torch.tensor([[3, 9, 4, 17, 5, 6]])


def save(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model = build_model(SMALL_MODEL, TOKENIZER, seed=3)
    return save(tmp_path / "base", model_files(model, TOKENIZER))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def trained(folder: Path, steps: int = 3, lora: LoraConfig = LORA) -> Backend:
    """A few steps towards some tokens."""
    settings = LearnerConfig(backend=BackendConfig(device="cpu"), lora=lora)
    with open_group(settings.backend, folder) as group:
        backend = make_backend(settings, load_policy(folder, lora, seed=5), group)
    for _ in range(steps):
        backend.backward(backend.run(lambda model: -model(input_ids=IDS).logits[0, :, 7].sum()))
        backend.step(0.05)
    return backend


def test_new_adapters_change_nothing_and_equal_seeds_give_equal_ones(base):
    model = load_policy(base, LORA, seed=5)
    torch.testing.assert_close(logits(model), logits(load_model(base)), rtol=0, atol=0)
    weights = [dict(load_policy(base, LORA, seed=seed).named_parameters()) for seed in (5, 5, 6)]
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])


def test_only_adapters_are_trained_published_and_given_moments(base):
    backend = trained(base)
    weights = backend.full_weights()
    assert len(weights) == 2 * 3 * SMALL_MODEL.layers and all(".lora_" in name for name in weights)
    moments = load(backend.state_files()["optimizer.safetensors"])
    assert {name.partition("/")[2] for name in moments} == set(weights)
    untouched = load_file(base / "model.safetensors")
    for name, parameter in backend.model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(parameter, untouched[name.replace(".base_layer", "")]), name


def test_a_published_version_is_the_base_as_it_was_and_the_adapters(base):
    backend = trained(base)
    files = PolicyFiles(backend.model, TOKENIZER, base, LORA)
    first, second = files.of(backend.full_weights()), files.of(backend.full_weights())
    assert first["model.safetensors"] == (base / "model.safetensors").read_bytes()
    assert first["model.safetensors"] is second["model.safetensors"], "it is not even copied"
    assert first == second and set(first) == {
        "config.json", "model.safetensors", "tokenizer.json", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    assert len(first["adapter_model.safetensors"]) < len(first["model.safetensors"]) / 2
    store = VersionStore(keep=3)
    manifests = [store.publish(Version(0, step), made) for step, made in enumerate((first, second))]
    assert manifests[0].files == manifests[1].files


def published(base: Path, folder: Path, steps: int = 3) -> tuple[Backend, Path]:
    backend = trained(base, steps)
    return backend, save(folder, PolicyFiles(backend.model, TOKENIZER, base, LORA).of(backend.full_weights()))


def test_peft_itself_reads_what_is_published(base, tmp_path):
    from peft import PeftModel

    backend, folder = published(base, tmp_path / "version")
    peft = PeftModel.from_pretrained(load_model(base), folder)
    torch.testing.assert_close(logits(peft), logits(backend.model), rtol=0, atol=0)
    assert not torch.allclose(logits(peft), logits(load_model(base)), atol=1e-2)


def engine_logprobs(*folders: Path) -> list[torch.Tensor]:
    """What an actor's engine says of the tokens under each version, swapped in one after the other."""

    async def ask() -> list[torch.Tensor]:
        engine = TorchEngine(max_batch=2, max_context=32)
        found = []
        for step, folder in enumerate(folders):
            await engine.load_weights(Version(0, step), folder)
            found.append(torch.from_numpy(await engine.score(IDS[0, :1].numpy(), IDS[0, 1:].numpy())))
        await engine.close()
        return found

    return asyncio.run(ask())


def expected_logprobs(model: torch.nn.Module) -> torch.Tensor:
    return torch.log_softmax(logits(model)[0, :-1], -1).gather(1, IDS[0, 1:, None])[:, 0]


def test_an_actor_with_base_and_adapter_computes_what_the_learner_does(base, tmp_path):
    one, first = published(base, tmp_path / "v1", steps=1)
    three, second = published(base, tmp_path / "v3", steps=3)
    for found, model in zip(engine_logprobs(first, second), (one.model, three.model), strict=True):
        torch.testing.assert_close(found, expected_logprobs(model), rtol=1e-5, atol=1e-5)


def test_a_folder_with_adapters_is_taken_up_again_or_merged(base, tmp_path):
    backend, folder = published(base, tmp_path / "version")
    again = load_policy(folder, LORA, seed=99)
    torch.testing.assert_close(logits(again), logits(backend.model), rtol=0, atol=0)
    merged = load_policy(folder, LoraConfig(), seed=0)
    assert dict(merged.named_parameters()).keys() == dict(load_model(base).named_parameters()).keys()
    assert all(parameter.requires_grad for parameter in merged.parameters())
    torch.testing.assert_close(logits(merged), logits(backend.model), rtol=1e-5, atol=1e-5)


def test_adapters_of_other_settings_are_refused(base, tmp_path):
    _, folder = published(base, tmp_path / "version")
    with pytest.raises(StorageError, match=r"rank 2.*this run has rank 4"):
        load_policy(folder, LoraConfig(rank=4), seed=0)


def test_a_target_that_is_no_layer_is_refused_with_those_that_are(base):
    with pytest.raises(ConfigError, match=r"learner.lora.targets.*q_proj.*got qproj"):
        load_policy(base, LoraConfig(rank=2, targets=["qproj"]), seed=0)


@pytest.mark.parametrize(
    "file, change, sentence",
    [
        ("adapter_config.json", lambda data: json.dumps({**json.loads(data), "use_dora": True}).encode(), "plain LoRA"),
        ("adapter_config.json", lambda data: b"{", "no readable adapter configuration"),
        ("adapter_config.json", lambda data: json.dumps({**json.loads(data), "r": 0}).encode(), "no readable"),
        ("adapter_model.safetensors", lambda data: data[:-1], "no readable safetensors"),
    ],
)  # fmt: skip
def test_an_adapter_that_an_actor_cannot_add_is_refused(base, tmp_path, file, change, sentence):
    _, folder = published(base, tmp_path / "version")
    (folder / file).write_bytes(change((folder / file).read_bytes()))
    with pytest.raises(EngineError, match=sentence):
        engine_logprobs(folder)
