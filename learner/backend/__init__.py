"""What trains the model: `torch` or `deepspeed`, behind one interface (`base.Backend`)."""

from __future__ import annotations

from transformers import PreTrainedModel

from common.config_learner import LearnerConfig
from learner.backend.base import Backend
from learner.backend.group import Group
from learner.backend.torch_backend import TorchBackend

__all__ = ["Backend", "make_backend"]


def make_backend(settings: LearnerConfig, model: PreTrainedModel, group: Group) -> Backend:
    """The backend that `learner.backend` names, around a model whose weights are loaded. Collective.

    Raises:
        ConfigError: DeepSpeed cannot run here.
    """
    if settings.backend.name == "deepspeed":
        # Imported only where it is chosen: the library is an extra, and takes seconds.
        from learner.backend.deepspeed_backend import DeepSpeedBackend

        return DeepSpeedBackend(model, settings.backend, settings.optimizer, group)
    return TorchBackend(model, settings.backend, settings.optimizer, group)
