"""The weights of a checkpoint put into a model: all of them or nothing. Its optimiser is the backend's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import StorageError
from learner.checkpoint import Checkpoint


def restore_weights(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    """Put a checkpoint's weights into a model, or nothing when anything does not fit.

    Raises:
        StorageError: it belongs to another model; the message names a tensor, expected and found.
    """
    parameters = dict(model.named_parameters())
    _check_tensors(checkpoint.path, {name: p.shape for name, p in parameters.items()}, checkpoint.weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(checkpoint.weights[name])


def _check_tensors(path: Path, expected: Mapping[str, torch.Size], found: Mapping[str, Tensor]) -> None:
    """Names, shapes, types and values, before anything is assigned."""
    for name in sorted({*expected, *found}):
        if name not in found or name not in expected:
            where = "the checkpoint lacks it" if name not in found else "this run's model has no such tensor"
            raise _foreign(path, name, where)
        tensor = found[name]
        if tensor.shape != expected[name] or tensor.dtype != torch.float32:
            got = f"{list(tensor.shape)} {tensor.dtype}"
            raise _foreign(path, name, f"expected {list(expected[name])} torch.float32, found {got}")
        if not torch.isfinite(tensor).all():
            raise StorageError(f"the checkpoint {path} holds a value in {name} that is not finite")


def _foreign(path: Path, tensor: str, what: str) -> StorageError:
    return StorageError(
        f"the checkpoint {path} belongs to another model: {tensor}: {what}; "
        "use the model settings it was made with, or start a new run"
    )
