"""Small models, their checkpoints, and what is the same in two of them."""

from pathlib import Path

import torch

from common.config import ModelConfig
from common.config_learner import LearnerConfig
from learner import checkpoint as module
from learner.backend.alone import alone
from learner.backend.optimizer import MOMENTS
from learner.backend.torch_backend import OPTIMIZER_FILE
from learner.checkpoint import (
    Checkpoint,
    save_checkpoint,
)
from learner.policy import build_model, load_model, model_files
from learner.state import RunState, capture_random, to_ranges
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
OLD = Path(__file__).with_name("stored") / "format-1" / "step-00000002"
"""A checkpoint that the release before format 2 wrote."""
FILES = (*module.NEEDED, OPTIMIZER_FILE)


def model_and_backend(seed: int = 1, steps: int = 2, settings: ModelConfig = SMALL_MODEL):
    model = build_model(settings, TOKENIZER, seed)
    backend = alone(model, LearnerConfig())
    for _ in range(steps):
        backend.backward(model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits.logsumexp(-1).sum())
        backend.step(0.01)
    return model, backend


def state(step: int, trained=()) -> RunState:
    return RunState(
        lineage=0, step=step, trained=to_ranges(trained), config_hash="abc", random=capture_random()
    )


def files_of(model, backend) -> dict[str, bytes]:
    return {**model_files(model, TOKENIZER), **backend.state_files()}


def restore(found: Checkpoint, model, backend) -> None:
    """As a start does: the optimiser's files, and the weights of the folder."""
    backend.load_state(found.files)
    model.load_state_dict(load_model(found.path).state_dict())


def save(folder: Path, step: int, seed: int = 1, keep: int = 2, trained=()) -> Path:
    return save_checkpoint(folder, state(step, trained), files_of(*model_and_backend(seed)), keep)


def everything(model, backend) -> list[torch.Tensor]:
    optimizer = backend.optimizer
    moments = [
        optimizer.state[p][m].clone() for p in model.parameters() if p in optimizer.state for m in MOMENTS
    ]
    return [p.detach().clone() for p in model.parameters()] + moments


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))
