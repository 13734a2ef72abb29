"""A program of one or several ranks, for tests: a toy updater under `learner.backend.worker`.

    python -m tests.learner.backend.ranks <folder>

The folder has `jobs.json`: a list of jobs, done one after the other by the same processes. Each leaves
`<name>.safetensors` (the weights), `<name>.json` (norms and hashes) and `<name>.rank<r>.json` (bytes held).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from common.config import ModelConfig
from common.config_backend import BackendConfig, LoraConfig
from common.config_learner import LearnerConfig, OptimizerConfig
from common.errors import TreewardError
from common.nouns import Tree, Version
from common.processes import follow_parent
from learner.backend import Backend, make_backend
from learner.backend.group import Group, given_rank, open_group
from learner.backend.worker import Ranks, follow
from learner.lora import PolicyFiles, load_policy
from learner.policy import build_model, model_files
from learner.rows import Clock
from tests.learner.helpers import SMALL_MODEL, TOKENIZER, flat_tree

LARGE_MODEL = ModelConfig(hidden_size=384, layers=1, heads=2, intermediate_size=768, max_context=128)
"""Its largest weights are above the size below which ZeRO 3 leaves a weight whole on every rank."""
PROMPTS = 40.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    backend: dict[str, Any]
    lora: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 3
    resume_after: int = 0
    """Save, build everything anew from the checkpoint, and go on."""
    poison: int = -1
    """The step before which a NaN gets into the gradient of the last rank."""
    branches: int = 3
    """Rows of each batch."""
    large: bool = False
    pause_s: float = 0.0

    @property
    def settings(self) -> LearnerConfig:
        return LearnerConfig(
            backend=BackendConfig(**self.backend),
            lora=LoraConfig(**self.lora),
            optimizer=OptimizerConfig(lr=0.01, warmup_steps=0),
        )


class Toy:
    """Makes the branches of trees likelier; each rank takes its share, one branch to a micro-batch."""

    def __init__(self, backend: Backend, group: Group, job: Job, out: Path) -> None:
        self.backend, self.group, self.job, self.out = backend, group, job, out

    def update(self, trees: Sequence[Tree], clock: Clock) -> float:
        rows = [row for tree in trees for row in branches(tree)]
        rank, world = self.backend.rank, self.backend.world
        for start in range(0, len(rows), world):
            if start + rank < len(rows):
                self.backend.backward(self.objective(rows[start + rank], clock))
            else:
                self.backend.idle()
        if self.job.large:
            measure(self.backend, self.out / f"{self.job.name}.rank{rank}.json")
        time.sleep(self.job.pause_s)
        return self.backend.step(0.01)

    def objective(self, row: list[int], clock: Clock) -> torch.Tensor:
        ids = torch.tensor([row])

        def forward(model: Any) -> torch.Tensor:
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(hidden[0, :-1]).float()
            return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])

        value = -self.backend.run(forward).sum() / PROMPTS
        if clock.current.step == self.job.poison and self.backend.rank == self.backend.world - 1:
            value = value * float("nan")
        return value


def branches(tree: Tree) -> list[list[int]]:
    """Token ids of each continuation of a flat tree."""
    found = []
    for continuation in tree.continuations:
        turns = [tree.nodes[0].turn, *(tree.nodes[index].turn for index in continuation.nodes)]
        data = b"".join(turn.action + turn.observation for turn in turns)
        found.append(np.frombuffer(data, "<i4").astype(int).tolist())
    return found


def batch(step: int, job: Job) -> list[Tree]:
    return [flat_tree(step, np.random.default_rng(step), branches=job.branches)]


def starting_folder(place: Path, job: Job) -> Path:
    folder = place / ("large" if job.large else "small")
    if not folder.is_dir():
        folder.mkdir()
        model = build_model(LARGE_MODEL if job.large else SMALL_MODEL, TOKENIZER, seed=3)
        for name, data in model_files(model, TOKENIZER).items():
            (folder / name).write_bytes(data)
    return folder


def digest(weights: dict[str, torch.Tensor]) -> str:
    data = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(weights.items()))
    return hashlib.sha256(data).hexdigest()


def measure(backend: Any, path: Path) -> None:
    """Bytes that this rank holds between the last backward pass and the step."""
    parameters = list(backend.model.parameters())
    engine = getattr(backend, "_engine", None)
    zero = engine.optimizer if engine is not None else None
    adam = zero.optimizer if zero is not None else backend.optimizer
    gradients: list[Any] = [p.grad for p in parameters] + [getattr(p, "grad_accum", None) for p in parameters]
    for name in ("averaged_gradients", "all_grad_tensors"):
        gradients += [g for group in getattr(zero, name, {}).values() for g in group or ()]
    whole = [p.data for p in parameters]
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    found = {
        "state": held([value for state in adam.state.values() for value in state.values()]),
        "gradients": held(gradients),
        "weights": held(whole + shards),
        "all": 4 * sum(getattr(p, "ds_numel", p.numel()) for p in parameters),
    }
    path.write_text(json.dumps(found))


def held(tensors: list[Any]) -> int:
    """Bytes of the distinct tensors."""
    sizes = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors if t is not None}
    return sum(sizes.values())


def checkpoint(place: Path, ranks: Ranks[float], job: Job, start: Path) -> Path:
    folder = place / f"{job.name}.checkpoint"
    folder.mkdir()
    weights = ranks.full_weights()
    files = PolicyFiles(ranks.backend.model, TOKENIZER, start, job.settings.lora).of(weights)
    for name, data in {**files, **ranks.state_files()}.items():
        (folder / name).write_bytes(data)
    return folder


def builder(job: Job, place: Path) -> Any:
    def build(group: Group, folder: Path) -> tuple[Backend, Toy]:
        backend = make_backend(job.settings, load_policy(folder, job.settings.lora, seed=5), group)
        return backend, Toy(backend, group, job, place)

    return build


def run_job(place: Path, job: Job, group: Group) -> None:
    if group.rank > 0:
        for _ in range(2 if job.resume_after else 1):
            follow(group, builder(job, place))
        return
    start = starting_folder(place, job)
    ranks: Ranks[float] = Ranks(group, builder(job, place), start, resumed=False)
    norms, hashes = [], []
    for step in range(job.steps):
        if step and step == job.resume_after:
            folder = checkpoint(place, ranks, job, start)
            ranks.end()
            ranks = Ranks(group, builder(job, place), folder, resumed=True)
        norms.append(ranks.update(batch(step, job), Clock(Version(0, step), 0)))
        hashes.append(digest(ranks.full_weights()))
    weights = ranks.full_weights()
    save_file(weights, place / f"{job.name}.safetensors")
    (place / f"{job.name}.json").write_text(json.dumps({"norms": norms, "hashes": hashes}))
    ranks.end()


def main(place: Path) -> int:
    follow_parent()
    torch.set_num_threads(1)
    (place / f"rank{given_rank()}.pid").write_text(str(os.getpid()))
    jobs = [Job(**job) for job in json.loads((place / "jobs.json").read_text())]
    try:
        with open_group(jobs[0].settings.backend, place) as group:
            for job in jobs:
                run_job(place, job, group)
    except TreewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(Path(sys.argv[1])))
