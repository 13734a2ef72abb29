"""The plain backend: every rank holds the whole model, and gradients are summed before each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from safetensors.torch import save as dump_tensors
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config_backend import BackendConfig
from common.config_learner import OptimizerConfig
from learner.backend.forward import Forward
from learner.backend.optimizer import MOMENTS, adamw, check, parse, trained

T = TypeVar("T")

OPTIMIZER_FILE = "optimizer.safetensors"
"""The same on all ranks, hence of rank 0 alone, and the same for any number of them."""


class Summing(Protocol):
    """What this backend asks of a group (`learner.backend.group.Group`, or `alone.Alone`)."""

    rank: int
    world: int
    device: torch.device

    def sum(self, values: Tensor) -> Tensor:
        """Σ over ranks, in place."""
        ...


class TorchBackend:
    """See `learner.backend.base.Backend`."""

    def __init__(
        self, model: PreTrainedModel, settings: BackendConfig, optimizer: OptimizerConfig, group: Summing
    ) -> None:
        self.rank, self.world, self.device = group.rank, group.world, group.device
        self.model = model
        nn.Module.to(model, group.device)
        self.optimizer = adamw(self.model, optimizer)
        self._grad_clip, self._group = optimizer.grad_clip, group
        self._forward = Forward(self.model, settings, group.device)
        self._trained = dict(trained(self.model))

    def run(self, forward: Callable[[PreTrainedModel], T]) -> T:
        return self._forward.of(self._forward, forward)

    def backward(self, objective: Tensor) -> None:
        if objective.requires_grad:
            objective.backward()

    def idle(self, gradient: bool = True) -> None:
        """Nothing: no pass of this backend needs another rank."""

    def step(self, lr: float) -> float:
        for parameter in self._trained.values():
            if parameter.grad is None:  # an honest zero: momentum goes on
                parameter.grad = torch.zeros_like(parameter)
        self._sum_gradients()
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), self._grad_clip))
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return norm

    def _sum_gradients(self) -> None:
        if self.world == 1:
            return
        for parameter in self._trained.values():
            assert parameter.grad is not None, "step gives each parameter one"
            self._group.sum(parameter.grad)

    def full_weights(self) -> dict[str, Tensor]:
        if self.rank > 0:
            return {}
        return {name: value.detach().cpu().contiguous() for name, value in self._trained.items()}

    def state_files(self) -> dict[str, bytes]:
        if self.rank > 0:
            return {}
        tensors = {
            f"{moment}/{name}": torch.as_tensor(value, dtype=torch.float32).cpu().contiguous()
            for name, parameter in self._trained.items()
            for moment, value in self.optimizer.state.get(parameter, {}).items()
            if moment in MOMENTS
        }
        return {OPTIMIZER_FILE: dump_tensors(tensors)}

    def state_names(self) -> list[str]:
        return [OPTIMIZER_FILE]

    def load_state(self, files: Mapping[str, bytes]) -> None:
        found = parse(OPTIMIZER_FILE, files)
        if found:  # empty before the first step
            shapes = {
                f"{moment}/{name}": torch.Size(()) if moment == "step" else parameter.shape
                for name, parameter in self._trained.items()
                for moment in MOMENTS
            }
            check(OPTIMIZER_FILE, found, shapes)
        self.optimizer.state.clear()
        for name, parameter in self._trained.items() if found else ():
            self.optimizer.state[parameter] = {
                moment: found[f"{moment}/{name}"].to("cpu" if moment == "step" else self.device).clone()
                for moment in MOMENTS
            }
