"""The warm start: a few supervised steps on demonstrations, so that there is a policy to improve.

    warmstart/demos.tw ─▶ rows of action tokens ─▶ cross-entropy, AdamW ─▶ warmstart/model/

consumes: demonstration trees and their tokenizer.  produces: a model, as the learner and the engines load it.
The same function serves as a control: the same minutes of more supervised steps, from given weights.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import PreTrainedModel

from common.config import Config
from common.errors import StorageError
from common.journal import fsync_dir, read_journal
from common.logs import fields, setup_logs
from common.metrics import MetricsClient
from common.nouns import ROOT, Tree, ids
from common.rundir import RunDir
from common.seeds import derive_seed
from common.tokenizer import WordTokenizer
from learner.backend.optimizer import adamw
from learner.batching import micro_batches
from learner.lora import check_targets
from learner.policy import build_model, load_model, model_files, token_logprobs, use_threads
from learner.rows import Row

LOG = logging.getLogger("treeward.warmstart")
ROLE = "warmstart"

LINES = 10
"""Progress lines of one warm start."""


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop: after `steps`, or once `seconds` have passed, whichever comes first."""

    steps: int
    seconds: float | None = None

    def allows(self, step: int, elapsed_s: float) -> bool:
        return step < self.steps and (self.seconds is None or elapsed_s < self.seconds)


def run_warmstart_training(
    config: Config,
    rundir: RunDir,
    *,
    start: Path | None = None,
    out: Path | None = None,
    budget: Budget | None = None,
) -> int:
    """Train on the run's demonstrations and save a model; returns the exit code.

    Args:
        config: `warmstart` says how long, `model` how large, `seed` the draws.
        rundir: holds the demonstrations and their tokenizer.
        start: folder of the weights to start from; None = fresh ones.
        out: where to save; None = the run's warm-start model.
        budget: None = `warmstart.steps`.

    Raises:
        StorageError: demonstrations are missing or damaged, or the disk refuses.
        ConfigError: the learner would refuse the model: adapters are asked for layers that it does not have.
    """
    setup_logs(ROLE, rundir.log_file(ROLE), run=rundir.id)
    use_threads(1 if config.deterministic else None)
    tokenizer = WordTokenizer.load(rundir.warmstart)
    rows = [row for tree in read_demonstrations(rundir.demonstrations_file) for row in supervised_rows(tree)]
    seed = derive_seed("model", config.seed)
    model = build_model(config.model, tokenizer, seed) if start is None else load_model(start)
    check_targets(model, config.learner.lora)  # before the time is spent, not when the learner starts
    metrics = MetricsClient(
        config.cluster.tracker if config.tracking.enabled else "", ROLE, ROLE,
        run=rundir.id, security=config.security,
    )  # fmt: skip
    try:
        train_supervised(model, rows, config, budget or Budget(config.warmstart.steps), metrics)
    finally:
        metrics.close()
    save_model(out or rundir.warmstart_model, model_files(model, tokenizer))
    return 0


def read_demonstrations(path: Path) -> list[Tree]:
    """The demonstration trees of a journal, in its order.

    Raises:
        StorageError: the file is missing, damaged, or holds no tree.
    """
    if not path.is_file():
        raise StorageError(f"there are no demonstrations at {path}: run role=warmstart, which writes them")
    try:
        trees = [
            msgspec.convert(record.fields["tree"], Tree, builtin_types=(bytes,))
            for record in read_journal(path)
            if record.kind == "tree"
        ]
    except (msgspec.ValidationError, KeyError) as error:
        raise StorageError(f"{path} holds something that is not a tree: {error}; write it again") from error
    if not trees:
        raise StorageError(f"{path} holds no demonstrations; write it again with role=warmstart")
    return trees


def supervised_rows(tree: Tree) -> list[Row]:
    """One row a branch; every action token is a target, nothing else is."""
    rows = []
    for leaf in tree.leaves():
        path = tree.walk(leaf.nodes[-1] if leaf.nodes else leaf.anchor)
        parts, masks = [ids(path[ROOT].turn.observation)], [np.zeros(len(path[ROOT].turn.observation) // 4)]
        for node in path[1:]:
            action, observation = ids(node.turn.action), ids(node.turn.observation)
            parts += [action, observation]
            masks += [np.ones(len(action)), np.zeros(len(observation))]
        mask = np.concatenate(masks).astype(np.bool_)
        if mask.any():
            end = int(np.flatnonzero(mask)[-1]) + 1
            lengths = [len(node.turn.action + node.turn.observation) // 4 for node in path]
            nodes = np.repeat([node.index for node in path], lengths)
            rows.append(_row(tree, leaf.number, np.concatenate(parts)[:end], mask[:end], nodes[:end]))
    return rows


def _row(tree: Tree, number: int, tokens: np.ndarray, mask: np.ndarray, nodes: np.ndarray) -> Row:
    zeros = np.zeros(len(tokens), np.float32)
    lags = np.zeros(len(tokens), np.int64)
    return Row(
        tree.id, number, tokens.astype(np.int64), mask, zeros, zeros, mask.astype(np.float32), lags, nodes
    )


def train_supervised(
    model: PreTrainedModel, rows: Sequence[Row], config: Config, budget: Budget, metrics: MetricsClient
) -> list[float]:
    """Cross-entropy on action tokens, mean over those of each batch; returns the loss of each step.

    −Σ log π(a | context) / tokens of the batch, in the distribution that is sampled from.
    Deterministic for a budget in steps: equal seeds, rows and settings give equal weights.
    """
    settings, step_losses = config.warmstart, list[float]()
    optimizer = adamw(model, config.learner.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = settings.lr
    model.eval()
    began = time.monotonic()
    batches = _batches(len(rows), settings.batch, config.seed)
    while budget.allows(len(step_losses), time.monotonic() - began):
        chosen = next(batches)
        optimizer.zero_grad()
        loss = _supervised_loss(model, rows, chosen, config)
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.optimizer.grad_clip)
        optimizer.step()
        step_losses.append(loss)
        metrics.log(len(step_losses), loss=loss)
        if len(step_losses) % max(1, budget.steps // LINES) == 0:
            LOG.info(
                "warm start step %d/%d  loss %.4f", len(step_losses), budget.steps, loss,
                extra=fields("warmstart", step=len(step_losses), loss=loss),
            )  # fmt: skip
    return step_losses


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    """Rows of one step after another: each epoch in a new order, drawn from the seed and the epoch alone."""
    epoch, waiting = 0, list[int]()
    while True:
        while len(waiting) < size:
            order = list(range(count))
            random.Random(derive_seed("warmstart", seed, epoch)).shuffle(order)
            waiting += order
            epoch += 1
        yield waiting[:size]
        waiting = waiting[size:]


def _supervised_loss(
    model: PreTrainedModel, rows: Sequence[Row], chosen: Sequence[int], config: Config
) -> float:
    """Accumulate the gradient of one batch; returns its loss. Divided once, by the batch's action tokens."""
    tokens = sum(int(rows[index].trained.sum()) for index in chosen)
    total = 0.0
    for batch in micro_batches(rows, chosen, config.learner.micro_batch_tokens):
        found = token_logprobs(model, batch, config.engine.temperature)
        loss = -found.logprobs.sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def save_model(path: Path, files: dict[str, bytes]) -> None:
    """Write a model folder so that it is there whole or not at all; an older one is replaced.

    Raises:
        StorageError: the disk refuses.
    """
    neighbour = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(neighbour, ignore_errors=True)
        neighbour.mkdir(parents=True)
        for name, data in files.items():
            with (neighbour / name).open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)
        neighbour.rename(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write the model {path}: {error.strerror}") from error
