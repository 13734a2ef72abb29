"""The frozen reference model: what the policy is held near to.

    learner.regularizer.reference, else model.path, else the run's warm start ──▶ Reference ──▶ log ref, [N]

It is loaded once and never trained: the same files for the whole life of a run, a resumed one included.

Shapes: N trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config import Config
from common.config_backend import LoraConfig
from common.errors import StorageError
from common.tokenizer import WordTokenizer
from learner.lora import load_policy
from learner.policy import TokenLogprobs, check_model

B = TypeVar("B")
Forward = Callable[[PreTrainedModel, B, float], TokenLogprobs]
"""(model, micro-batch, temperature), as `learner.policy.token_logprobs`: one definition for both models."""


class Reference(Generic[B]):
    """Log-probabilities of sampled tokens under a model that never changes."""

    def __init__(self, model: PreTrainedModel, forward: Forward[B], temperature: float) -> None:
        self.model = model.eval().requires_grad_(False)
        self._forward = forward
        self._temperature = temperature

    def logprobs(self, batch: B) -> Tensor:
        """log ref of the batch's trained tokens, `[N]`, without gradient, at the temperature of sampling:
        the two distributions compared are those that tokens are drawn from."""
        with torch.no_grad():
            return self._forward(self.model, batch, self._temperature).logprobs


def reference_folder(config: Config, warmstart: Path) -> Path:
    """Where the reference lies: as configured, else what the run itself starts from (never a checkpoint)."""
    return Path(config.learner.regularizer.reference or config.model.path or warmstart)


def load_reference(
    config: Config,
    warmstart: Path,
    tokenizer: WordTokenizer,
    forward: Forward[B],
    device: torch.device | str = "cpu",
) -> Reference[B] | None:
    """The reference model; None where the KL coefficient is zero, and nothing is loaded.

    Args:
        config: of the run.
        warmstart: the folder of the run's warm-start model.
        tokenizer: the policy's: ids must mean the same words in both models.
        forward: how log-probabilities are computed, the policy's own function.
        device: where it runs.

    Raises:
        StorageError: there is no such model, or it speaks another vocabulary.
    """
    if config.learner.regularizer.kl_coefficient == 0:
        return None
    folder = reference_folder(config, warmstart)
    try:
        check_model(folder)
        model = load_policy(folder, LoraConfig(), seed=0)  # adapters that lie there are merged
        vocabulary = WordTokenizer.load(folder).sha256
    except StorageError as error:
        raise StorageError(
            f"the reference model cannot be loaded: {str(error).partition('; run role=')[0]}; set "
            "learner.regularizer.reference to the folder of a saved model (empty = what the run started from)"
        ) from error
    if vocabulary != tokenizer.sha256:
        raise StorageError(
            f"the reference model at {folder} has another tokenizer.json than the policy: its token ids mean "
            "other words; set learner.regularizer.reference to a model made with the same vocabulary"
        )
    return Reference(model.to(device), forward, config.engine.temperature)  # type: ignore[arg-type]
