"""Low-rank adapters beside a model's weights: added to them once, when a version is loaded.

    W' = W + alpha / r · B A        (LoRA, arXiv 2106.09685, §4.1: no cost at inference)

The files are those of peft (`adapter_config.json`, `adapter_model.safetensors`); the library is not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.errors import EngineError

ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
NOT_PLAIN = (
    "use_rslora",
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
)
"""Settings of peft that change the formula above, unless they are off."""

Tensors = dict[str, torch.Tensor]


def with_adapter(directory: Path, tensors: Tensors) -> Tensors:
    """`tensors`, with the adapter in the same directory added; as they are where there is none.

    Raises:
        EngineError: the adapter cannot be read, is of another kind, or does not fit a tensor, which is named.
    """
    if not (directory / ADAPTER_CONFIG_FILE).is_file():
        return tensors
    scale = _scale(directory / ADAPTER_CONFIG_FILE)
    path = directory / ADAPTER_FILE
    try:
        adapter = load_file(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path} is no readable safetensors file: {error}") from error
    merged = dict(tensors)
    for name, down in adapter.items():
        if not name.endswith(A):
            if name.removesuffix(B) + A not in adapter:
                raise EngineError(f"{path}: tensor {name} has no lora_A beside it")
            continue
        up, target = adapter.get(name.removesuffix(A) + B), _target(name)
        if up is None or target not in merged:
            raise EngineError(f"{path}: tensor {name} has no partner, or the model has no {target}")
        if up.ndim != 2 or down.ndim != 2 or (up.shape[0], down.shape[1]) != merged[target].shape:
            raise EngineError(
                f"{path}: {name} must fit {target} of shape {tuple(merged[target].shape)}, "
                f"got {tuple(up.shape)} times {tuple(down.shape)}"
            )
        merged[target] = merged[target].float() + scale * (up.float() @ down.float())
    return merged


def _target(name: str) -> str:
    return name.removeprefix(PREFIX).removesuffix(A) + ".weight"


def _scale(path: Path) -> float:
    try:
        settings: dict[str, Any] = json.loads(path.read_bytes())
        kind, scale = settings["peft_type"], float(settings["lora_alpha"]) / int(settings["r"])
        odd = [key for key in NOT_PLAIN if settings.get(key)]
        bias = settings.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError) as error:
        raise EngineError(f"{path} is no readable adapter configuration: {error}") from error
    if kind != "LORA" or odd or bias != "none":
        raise EngineError(f"{path} must describe plain LoRA adapters, got {', '.join([str(kind), *odd])}")
    return scale
