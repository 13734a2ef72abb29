"""AdamW of the parameters that are trained, and its state by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from torch import Tensor, nn

from common.config_learner import OptimizerConfig
from common.errors import StorageError

ADAM_EPSILON = 1e-8
"""PyTorch's default, as in the papers compared here."""
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter; the moments have its shape, `step` is a number."""


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that get a gradient, in their order of definition."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def adamw(model: nn.Module, settings: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over what is trained."""
    return torch.optim.AdamW(
        [parameter for _, parameter in trained(model)],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=ADAM_EPSILON,
        weight_decay=settings.weight_decay,
    )


def parse(name: str, files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The tensors of a file of the optimiser. Raises `StorageError` where it is missing or damaged."""
    if name not in files:
        raise StorageError(f"the checkpoint lacks {name}; resume with the learner.backend it was made with")
    try:
        return dict(parse_tensors(files[name]))
    except (SafetensorError, ValueError) as error:
        raise StorageError(f"{name} of the checkpoint is damaged: {error}") from error


def check(name: str, found: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Names, shapes and values, before anything is assigned. Raises `StorageError` naming the tensor."""
    for tensor in sorted({*found, *shapes}):
        if tensor not in found or tensor not in shapes:
            lacking = "it is missing" if tensor not in found else "this run's model has no such tensor"
            raise StorageError(f"{name} of the checkpoint belongs to another model: {tensor}: {lacking}")
        value, shape = found[tensor], shapes[tensor]
        if value.shape != shape or value.dtype != torch.float32:
            raise StorageError(
                f"{name} of the checkpoint belongs to another model: {tensor}: expected {list(shape)} "
                f"float32, found {list(value.shape)} {value.dtype}"
            )
        if not bool(torch.isfinite(value).all()):
            raise StorageError(f"{name} of the checkpoint holds a value in {tensor} that is not finite")
