"""What every rank builds from a folder, and the folders that it refuses before a batch has come."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

import run as door
from common.config import Config
from common.config_backend import BackendConfig, LoraConfig
from common.config_learner import CreditConfig, LossConfig, Packing, RegularizerConfig
from common.errors import StorageError
from common.opening import record
from common.rundir import RunDir
from learner.assembly import assembly
from learner.backend.group import open_group
from learner.critic import CRITIC_FILE
from learner.lora import adapter_files, load_policy
from learner.packable import CannotPack
from learner.policy import build_model, model_files
from learner.rows import Clock
from learner.update import Updater
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, V0, flat_trees, learner_config

MISTRAL = dict(
    vocab_size=TOKENIZER.vocab_size, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, sliding_window=8, max_position_embeddings=128,
    eos_token_id=TOKENIZER.end_id, bos_token_id=None, pad_token_id=None,
)  # fmt: skip


def folder_of(path: Path, model: Any) -> Path:
    path.mkdir(parents=True)
    for name, data in model_files(model, TOKENIZER).items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "model", build_model(SMALL_MODEL, TOKENIZER, seed=3))


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    """A model that sees only eight places back."""
    return folder_of(tmp_path / "windowed", MistralForCausalLM(MistralConfig(**MISTRAL)))


def build(folder: Path, *, deterministic: bool = False, **learner: object) -> Updater:
    settings = learner_config(**learner)
    config = Config(deterministic=deterministic, learner=settings)
    with open_group(BackendConfig(device="cpu"), folder) as group:
        _, updater = assembly(config, RunDir(folder.parent))(group, folder)
    assert isinstance(updater, Updater)
    return updater


def batch() -> list[Any]:
    return flat_trees(4)


def test_a_model_that_cannot_be_packed_is_refused_before_a_batch_has_come(windowed):
    with pytest.raises(CannotPack, match=r"a sliding window of 8 tokens; set learner\.packing=rows$"):
        build(windowed)
    for updater in (build(windowed, packing=Packing.ROWS), build(windowed, deterministic=True)):
        assert updater.update(batch(), Clock(V0, 1)).applied


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_learner_with_a_model_that_cannot_be_packed_ends_at_once_with_a_sentence(
    windowed, tmp_path, processes
):
    words = [
        "role=learner", "run=runs/x", "tracking=none", f"model.path={windowed}",
        f"learner.backend.processes={processes}",
    ]  # fmt: skip
    record(RunDir.create(tmp_path / "runs", "x"), Config())
    done = subprocess.run(
        [sys.executable, door.__file__, *words], cwd=tmp_path, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: trees cannot be packed for a mistral model") and "Traceback" not in last
    assert "learner.packing=rows" in last and "Traceback" not in done.stderr


def test_a_reference_is_asked_in_the_precision_of_the_policy(folder):
    """At the start the two are one model: any divergence between them would be rounding."""
    updater = build(
        folder,
        backend=BackendConfig(device="cpu", dtype="bfloat16"),
        regularizer=RegularizerConfig(kl_coefficient=1.0, reference=str(folder)),
    )
    assert updater.update(batch(), Clock(V0, 1)).metrics["kl_term"] == 0


def test_a_reference_with_adapters_beside_it_is_the_model_they_were_trained_to(folder, tmp_path):
    policy = load_policy(folder, LoraConfig(rank=2), seed=1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.add_(0.3)
    adapted = folder_of(tmp_path / "adapted", build_model(SMALL_MODEL, TOKENIZER, seed=3))
    for name, data in adapter_files(dict(policy.named_parameters()), LoraConfig(rank=2)).items():
        (adapted / name).write_bytes(data)

    def kl(reference: Path) -> float:
        terms = RegularizerConfig(kl_coefficient=1.0, reference=str(reference))
        found = build(folder, regularizer=terms).update(batch(), Clock(V0, 1))
        return found.metrics["kl_term"]

    assert kl(folder) == 0 and kl(adapted) > 1e-3


def test_a_weight_that_is_not_finite_is_refused_with_its_name(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StorageError, match=r"model\.norm\.weight that is not finite"):
        build(folder)


def test_a_critic_beside_the_model_goes_on_and_a_foreign_one_is_refused(folder):
    settings: dict[str, Any] = dict(
        credit=CreditConfig(name="tree_vtrace", critic="head"),
        loss=LossConfig(name="reinforce", minibatches=1),
    )
    first = build(folder, **settings)
    first.update(batch(), Clock(V0, 1))
    (folder / CRITIC_FILE).write_bytes(first.state_files()[CRITIC_FILE])
    assert build(folder, **settings).state_files() == first.state_files()
    (folder / CRITIC_FILE).write_bytes(b"nothing")
    with pytest.raises(StorageError, match="does not fit this run's value head"):
        build(folder, **settings)
