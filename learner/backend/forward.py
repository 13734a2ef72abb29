"""A forward pass as one module call: what both backends wrap around the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.config_backend import BackendConfig

T = TypeVar("T")

IDLE_TOKENS = 2
"""Of the pass that a rank without work takes part in."""


class Forward(nn.Module):
    """Runs a function of the model as its forward pass, so that a backend's hooks on modules see where it
    begins and ends. bfloat16 is autocast's: products of matrices in bfloat16, everything kept in float32.

    No dropout is ever active: the distribution must be the one that the engine sampled from.
    """

    def __init__(self, model: PreTrainedModel, settings: BackendConfig, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast(settings, device)
        self._work: Callable[[PreTrainedModel], Any] | None = None
        self.eval()
        self._layers = recomputed_layers(model) if settings.gradient_checkpointing else []

    def of(self, call: nn.Module | Callable[[], Any], work: Callable[[PreTrainedModel], T]) -> T:
        """`work(model)`, within `call()`: this module, or the engine that wraps it."""
        for layer in self._layers:
            # These recompute only while they train. Their own flag alone is set: what is in them stays
            # without dropout.
            layer.training = torch.is_grad_enabled()
        self._work = work
        try:
            found: T = call()
        finally:
            self._work = None
        return found

    def forward(self) -> Any:
        """What `of` was given. Not to be called otherwise."""
        assert self._work is not None, "call `of`"
        with self._autocast:
            return self._work(self.model)


def autocast(settings: BackendConfig, device: torch.device) -> torch.autocast:
    """The precision of every pass, also of models that no backend holds."""
    return torch.autocast(
        device.type,
        dtype=torch.bfloat16,
        enabled=settings.dtype == "bfloat16",
        cache_enabled=False,  # it would keep the casted weights of layers that ZeRO 3 has let go
    )


def recomputed_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers whose activations are computed again in the backward pass."""
    # The newer name of the same, where this release of transformers has it.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    found = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    model.eval()
    return found


def idle_pass(device: torch.device) -> Callable[[PreTrainedModel], Tensor]:
    """A forward pass on a few tokens that uses every layer; its value is zero, its gradient too."""

    def forward(model: PreTrainedModel) -> Tensor:
        backbone: Any = model.base_model
        ids = torch.zeros(1, IDLE_TOKENS, dtype=torch.int64, device=device)
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
        head: Any = model.get_output_embeddings()
        logits: Tensor = head(hidden)
        return (logits.float() * 0.0).sum()

    return forward
