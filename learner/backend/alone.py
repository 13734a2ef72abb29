"""The plain backend of one process without any group: for tools, benchmarks and tests."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config_learner import LearnerConfig
from learner.backend.torch_backend import TorchBackend


class Alone:
    """A group of one (`learner.backend.group.Group`)."""

    rank, world = 0, 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sum(self, values: Tensor) -> Tensor:
        """Itself: there is nobody else."""
        return values

    def gather(self, data: bytes) -> list[bytes]:
        """Of all ranks: of this one."""
        return [data]


def alone(model: PreTrainedModel, settings: LearnerConfig, device: str = "cpu") -> TorchBackend:
    """A backend around a model, for one process."""
    return TorchBackend(model, settings.backend, settings.optimizer, Alone(torch.device(device)))
