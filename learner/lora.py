"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: small matrices are trained, the base stays.

    config.json, model.safetensors, tokenizer.json    the base, as the run started: the same in every version
    adapter_model.safetensors, adapter_config.json    what is trained, as peft itself reads and writes it

Checkpoints and published versions hold both. Whoever pulls versions fetches a file whose hash it has already
once only: with adapters, that is the base.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config_backend import LoraConfig
from common.errors import ConfigError, StorageError
from common.tokenizer import WordTokenizer
from learner.policy import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, load_model

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX, ADAPTER = "base_model.model.", ".default"
"""How peft names a parameter in files, and its only adapter within the model."""


def load_policy(folder: Path, settings: LoraConfig, seed: int) -> PreTrainedModel:
    """The model in a folder, with adapters if they are asked for: those beside it, or new ones.

    New adapters change nothing yet (their second matrix is zero); equal seeds give equal ones.

    Raises:
        StorageError: the folder holds adapters of other settings, or no model.
        ConfigError: no layer has the name of a target.
    """
    there = (folder / ADAPTER_CONFIG_FILE).is_file()
    with _base_only(folder) if there else _as_it_is(folder) as base:
        model = load_model(base)
    found = _read_config(folder) if there else None
    if found is not None and settings.rank > 0 and found != _config(settings):
        raise StorageError(
            f"{folder} holds adapters of other settings ({_shown(found)}), this run has "
            f"{_shown(_config(settings))}; use the learner.lora settings it was made with"
        )
    if settings.rank > 0:
        add_adapters(model, settings, seed)
        if there:
            _assign(model, folder)
    elif found is not None:
        add_adapters(model, _settings_of(found), seed)
        _assign(model, folder)
        merge_adapters(model)
    return model


def check_targets(model: PreTrainedModel, settings: LoraConfig) -> None:
    """Raise `ConfigError` where adapters are asked for and a target names no linear layer of the model."""
    named = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    missing = sorted(set(settings.targets) - named)
    if settings.rank > 0 and missing:
        raise ConfigError(
            f"learner.lora.targets must name linear layers of the model ({', '.join(sorted(named))}), "
            f"got {', '.join(missing)}"
        )


def add_adapters(model: PreTrainedModel, settings: LoraConfig, seed: int) -> None:
    """Put adapters into the target layers, in place; all else stops being trained.

    The model keeps its class and its modules their names, so that whoever calls it sees no difference.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    check_targets(model, settings)
    config = PeftConfig(
        r=settings.rank, target_modules=list(settings.targets), lora_dropout=0.0,
        lora_alpha=cast(int, settings.alpha),  # any number: it is divided by the rank
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)


def merge_adapters(model: PreTrainedModel) -> None:
    """Add each adapter's product to its layer's weight, and leave plain layers, in place."""
    from peft.tuners.lora import LoraLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer.get_base_layer())
    model.requires_grad_(True)


# ------------------------------------------------------------------------------------------------------ files


class PolicyFiles:
    """The files of a policy, as actors, evaluations and checkpoints take them.

    Args:
        folder: what the run started from. With adapters, its base goes out as it is.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: WordTokenizer, folder: Path, settings: LoraConfig
    ) -> None:
        self._settings = settings
        self._same = {
            CONFIG_FILE: model.config.to_json_string(use_diff=False).encode(),
            TOKENIZER_FILE: tokenizer.to_json().encode(),
        }
        if settings.rank > 0:
            try:
                self._same[WEIGHTS_FILE] = (folder / WEIGHTS_FILE).read_bytes()
            except OSError as error:
                raise StorageError(f"cannot read {folder / WEIGHTS_FILE}: {error.strerror}") from error

    def of(self, weights: Mapping[str, Tensor]) -> dict[str, bytes]:
        """By name, from what a backend's `full_weights` gave; equal weights give equal bytes.

        The bytes of what does not change are the same objects each time.
        """
        if self._settings.rank > 0:
            return {**self._same, **adapter_files(weights, self._settings)}
        return {**self._same, WEIGHTS_FILE: dump_tensors(dict(weights), metadata={"format": "pt"})}


def adapter_files(weights: Mapping[str, Tensor], settings: LoraConfig) -> dict[str, bytes]:
    """peft's two files of the adapters in `weights`."""
    tensors = {_name_in_file(name): value for name, value in weights.items() if ".lora_" in name}
    return {
        ADAPTER_CONFIG_FILE: json.dumps(_config(settings), indent=2, sort_keys=True).encode(),
        ADAPTER_FILE: dump_tensors(tensors, metadata={"format": "pt"}),
    }


def _name_in_file(name: str) -> str:
    return PREFIX + name.replace(f"{ADAPTER}.", ".")


def _config(settings: LoraConfig) -> dict[str, Any]:
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True,
        "base_model_name_or_path": None, "r": settings.rank, "lora_alpha": settings.alpha,
        "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "target_modules": list(settings.targets),
    }  # fmt: skip


def _settings_of(config: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig(rank=config["r"], alpha=config["lora_alpha"], targets=list(config["target_modules"]))


def _shown(config: Mapping[str, Any]) -> str:
    return f"rank {config.get('r')}, alpha {config.get('lora_alpha')}, targets {config.get('target_modules')}"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG_FILE
    try:
        found = json.loads(path.read_bytes())
        known = _config(_settings_of(found))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    if found != known:
        raise StorageError(f"{path} is not of this release: merge its adapters into the model first")
    return known


def _assign(model: PreTrainedModel, folder: Path) -> None:
    """The adapters' weights in a folder, into a model that has adapters of the same shape."""
    path = folder / ADAPTER_FILE
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    wanted = {
        _name_in_file(name): parameter for name, parameter in model.named_parameters() if ".lora_" in name
    }
    for name in sorted({*found, *wanted}):
        if name not in found or name not in wanted or found[name].shape != wanted[name].shape:
            raise StorageError(f"{path} belongs to another model: see its tensor {name}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(found[name])


@contextmanager
def _base_only(folder: Path) -> Iterator[Path]:
    """The model's own files: transformers takes any folder with an adapter for nothing but that."""
    with tempfile.TemporaryDirectory(prefix="treeward-base-") as place:
        for name in (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE):
            if (folder / name).is_file():
                (Path(place) / name).symlink_to((folder / name).absolute())
        yield Path(place)


@contextmanager
def _as_it_is(folder: Path) -> Iterator[Path]:
    yield folder
