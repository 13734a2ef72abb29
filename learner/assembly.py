"""From a folder to what trains: model, backend, reference and updater, the same on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from common.config import Config
from common.config_learner import Packing
from common.errors import StorageError
from common.rundir import RunDir
from common.tokenizer import WordTokenizer
from learner.backend import Backend, make_backend
from learner.backend.forward import autocast
from learner.backend.group import Group
from learner.backend.worker import Build
from learner.batching import MicroBatch
from learner.critic import CRITIC_FILE
from learner.lora import load_policy
from learner.packable import check_packable
from learner.policy import TokenLogprobs, token_logprobs, without_adapter
from learner.reference import load_reference
from learner.update import Updater, UpdateReport


def assembly(config: Config, rundir: RunDir) -> Build[UpdateReport]:
    """The function that every rank builds its part with.

    Its result raises:
        StorageError: the folder holds no model, one with a weight that is not finite, or a foreign critic.
        ConfigError: the backend cannot run here, or the model cannot do what the settings ask.
    """

    def build(group: Group, folder: Path) -> tuple[Backend, Updater]:
        settings = config.learner
        model = load_policy(folder, settings.lora, config.seed)
        for name, weight in model.named_parameters():
            if not torch.isfinite(weight).all():
                raise StorageError(f"the model at {folder} holds a value in {name} that is not finite")
        if settings.packing is Packing.TREE and not config.deterministic:
            check_packable(without_adapter(model))
        backend = make_backend(settings, model, group)

        def forward(model: PreTrainedModel, batch: MicroBatch, temperature: float) -> TokenLogprobs:
            # In the policy's own precision: a difference in rounding is no divergence.
            with autocast(settings.backend, backend.device):
                return token_logprobs(model, batch, temperature)

        reference = load_reference(
            config, rundir.warmstart_model, WordTokenizer.load(folder), forward, backend.device
        )
        updater = Updater(
            backend,
            settings,
            temperature=config.engine.temperature,
            deterministic=config.deterministic,
            seed=config.seed,
            reference=reference,
            group=group,
        )
        critic = folder / CRITIC_FILE
        if critic.is_file():
            updater.load_state({CRITIC_FILE: critic.read_bytes()})
        return backend, updater

    return build
