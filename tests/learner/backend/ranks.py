"""A program of one or several ranks, for tests: the learner's own updater under `learner.backend.worker`.

    python -m tests.learner.backend.ranks <folder>

The folder has `jobs.json`: a list of jobs, done one after the other by the same processes. Each leaves
`<name>.safetensors` (the weights), `<name>.json` (norms, hashes and metrics) and, where it measures,
`<name>.rank<r>.json` (bytes held).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from common.config import Config, ModelConfig
from common.config_backend import BackendConfig, LoraConfig
from common.config_learner import (
    CreditConfig,
    LearnerConfig,
    LossConfig,
    OptimizerConfig,
    RegularizerConfig,
    WeightConfig,
)
from common.errors import TreewardError
from common.nouns import Tree, Version
from common.processes import follow_parent
from common.ranks import given_rank
from common.rundir import RunDir
from learner.assembly import assembly
from learner.backend import Backend
from learner.backend.group import Group, open_group
from learner.backend.worker import Ranks, Trains, follow
from learner.lora import PolicyFiles
from learner.policy import build_model, model_files
from learner.rows import Clock
from learner.update import UpdateReport
from tests.learner.forests import random_tree
from tests.learner.helpers import SMALL_MODEL, TOKENIZER

LARGE_MODEL = ModelConfig(hidden_size=384, layers=1, heads=2, intermediate_size=768, max_context=128)
"""Its largest weights are above the size below which ZeRO 3 leaves a weight whole on every rank."""
TREES, MICRO_BATCH = 4, 32
LAG = 100
"""No token is too old."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    backend: dict[str, Any]
    lora: dict[str, Any] = dataclasses.field(default_factory=dict)
    credit: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss: dict[str, Any] = dataclasses.field(default_factory=dict)
    weight: dict[str, Any] = dataclasses.field(default_factory=dict)
    kl: float = 0.0
    steps: int = 3
    lr: float = 0.01
    resume_after: int = 0
    """Save, build everything anew from the checkpoint, and go on."""
    poison: int = -1
    """The step in which a NaN gets into the gradients of the last rank."""
    large: bool = False
    measure: bool = False
    shards_above: int = 0
    """ZeRO 3: weights of more elements are sharded; 0 = as the library decides."""
    logits_at_once: int = 0
    """Most logits held at a time, where that number can be kept; 0 = as always."""
    pause_s: float = 0.0

    def settings(self, place: Path) -> LearnerConfig:
        reference = str(starting_folder(place, self)) if self.kl else ""
        return LearnerConfig(
            batch_trees=TREES,
            max_policy_lag=LAG,
            micro_batch_tokens=MICRO_BATCH,
            backend=BackendConfig(**self.backend),
            lora=LoraConfig(**self.lora),
            credit=CreditConfig(**self.credit),
            loss=LossConfig(**{"minibatches": 2, **self.loss}),
            weight=WeightConfig(**self.weight),
            regularizer=RegularizerConfig(kl_coefficient=self.kl, reference=reference),
            optimizer=OptimizerConfig(lr=self.lr, warmup_steps=0),
        )


class Watched:
    """The updater, with what a test does to it."""

    def __init__(self, updater: Trains[UpdateReport], backend: Any, job: Job, out: Path) -> None:
        self._updater, self._backend, self._job, self._out = updater, backend, job, out
        self._backward, self._step = backend.backward, backend.step
        backend.backward, backend.step = self.backward, self.step
        self._poisoned = False

    def update(self, trees: Sequence[Tree], clock: Clock) -> UpdateReport:
        last = self._backend.rank == self._backend.world - 1
        self._poisoned = last and clock.current.step == self._job.poison
        time.sleep(self._job.pause_s)
        return self._updater.update(trees, clock)

    def state_files(self) -> dict[str, bytes]:
        return self._updater.state_files()

    def backward(self, objective: torch.Tensor) -> None:
        self._backward(objective * float("nan") if self._poisoned else objective)

    def step(self, lr: float) -> float:
        if self._job.measure:
            measure(self._backend, self._out / f"{self._job.name}.rank{self._backend.rank}.json")
        return float(self._step(lr))


def batch(step: int) -> list[Tree]:
    """Trees that branch, most of them larger than a micro-batch: split by branches, with shared prefixes."""
    rng = np.random.default_rng(step)
    return [random_tree(rng, TREES * step + number) for number in range(TREES)]


def starting_folder(place: Path, job: Job) -> Path:
    folder = place / ("large" if job.large else "small")
    if not folder.is_dir() and given_rank() == 0:
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


def checkpoint(place: Path, ranks: Ranks[UpdateReport], job: Job, start: Path) -> Path:
    folder = place / f"{job.name}.checkpoint"
    folder.mkdir()
    weights = ranks.full_weights()
    files = PolicyFiles(ranks.backend.model, TOKENIZER, start, LoraConfig(**job.lora)).of(weights)
    for name, data in {**files, **ranks.state_files()}.items():
        (folder / name).write_bytes(data)
    return folder


def builder(job: Job, place: Path) -> Any:
    """As the learner builds its ranks."""
    build = assembly(Config(seed=5, learner=job.settings(place)), RunDir(place))

    def watched(group: Group, folder: Path) -> tuple[Backend, Watched]:
        backend, updater = build(group, folder)
        return backend, Watched(updater, backend, job, place)

    return watched


@contextlib.contextmanager
def changed(job: Job) -> Iterator[None]:
    """Constants of the policy and of the library, as the job has them."""
    with pytest.MonkeyPatch.context() as patch:
        if job.logits_at_once:
            patch.setattr("learner.policy.LOGITS_AT_ONCE", job.logits_at_once)
        if job.shards_above:
            import deepspeed

            real = deepspeed.initialize

            def initialize(*, config: dict[str, Any], **more: Any) -> Any:
                config["zero_optimization"]["stage3_param_persistence_threshold"] = job.shards_above
                return real(config=config, **more)

            patch.setattr(deepspeed, "initialize", initialize)
        yield


def run_job(place: Path, job: Job, group: Group) -> None:
    if group.rank > 0:
        for _ in range(2 if job.resume_after else 1):
            follow(group, builder(job, place))
        return
    start = starting_folder(place, job)
    ranks: Ranks[UpdateReport] = Ranks(group, builder(job, place), start, resumed=False)
    hashes, metrics = [], []
    for step in range(job.steps):
        if step and step == job.resume_after:
            folder = checkpoint(place, ranks, job, start)
            ranks.end()
            ranks = Ranks(group, builder(job, place), folder, resumed=True)
        report = ranks.update(batch(step), Clock(Version(0, step), LAG))
        counts = dataclasses.asdict(report.counts)
        metrics.append({**report.metrics, **counts, "skipped": report.minibatches_skipped})
        hashes.append(digest(ranks.full_weights()))
    weights = ranks.full_weights()
    save_file(weights, place / f"{job.name}.safetensors")
    (place / f"{job.name}.json").write_text(json.dumps({"metrics": metrics, "hashes": hashes}))
    ranks.end()


def main(place: Path) -> int:
    follow_parent()
    torch.set_num_threads(1)
    (place / f"rank{given_rank()}.pid").write_text(str(os.getpid()))
    jobs = [Job(**job) for job in json.loads((place / "jobs.json").read_text())]
    try:
        with open_group(BackendConfig(**jobs[0].backend), place) as group:
            for job in jobs:
                with changed(job):
                    run_job(place, job, group)
    except TreewardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(Path(sys.argv[1])))
