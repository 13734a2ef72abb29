"""What the training loop asks of a backend, whatever shards it keeps.

    objective ─backward─▶ gradients, summed over micro-batches and ranks ─step─▶ clip, AdamW ─▶ new weights

Every method marked *collective* is called by all ranks, in the same order. Between two of them a rank may do
what it likes, except under ZeRO, whose forward and backward passes are collective too: there, a rank with
fewer micro-batches than another calls `idle` for each one that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

T = TypeVar("T")


class Backend(Protocol):
    """A model, its optimiser, and this rank's part of both."""

    rank: int
    world: int
    model: PreTrainedModel
    """For its configuration and structure. Under ZeRO 3 its parameters are empty outside of `run`."""
    device: torch.device
    """Where the tensors of a micro-batch must be."""

    def run(self, forward: Callable[[PreTrainedModel], T]) -> T:
        """`forward(model)`: the only way to the model's outputs, in the dtype of the configuration.

        Args:
            forward: returns a tensor, or a tuple or named tuple of tensors.
        """
        ...

    def backward(self, objective: Tensor) -> None:
        """Add the gradient of a scalar to what is accumulated; the sum runs over ranks too.

        A scalar without a graph adds nothing, and is as good as `idle`.
        """
        ...

    def idle(self, gradient: bool = True) -> None:
        """A forward pass on two tokens and, with `gradient`, a backward pass that adds zero.

        Nothing where passes of ranks need not pair up.
        """
        ...

    def step(self, lr: float) -> float:
        """Clip by the global norm, step, forget the gradients: the norm before the clip. *Collective.*

        Where the norm is not finite (NaN or infinity is returned), weights and moments stay as they are.
        """
        ...

    def full_weights(self) -> dict[str, Tensor]:
        """What is trained, by the parameter's name, in float32 on the CPU. *Collective.*

        Complete on rank 0, empty elsewhere.
        """
        ...

    def state_files(self) -> dict[str, bytes]:
        """This rank's part of the optimiser (and master weights): safetensors by name. *Collective.*"""
        ...

    def state_names(self) -> list[str]:
        """The files that this rank reads on resuming."""
        ...

    def load_state(self, files: Mapping[str, bytes]) -> None:
        """Put back what `state_files` gave, after the same weights were loaded. *Collective.*

        Raises:
            StorageError: a file is missing, damaged, or of another model, world or stage; nothing was
                assigned on this rank.
        """
        ...
