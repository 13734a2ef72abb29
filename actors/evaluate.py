"""How good a policy is on tasks it was never trained on: one episode a task, all of them at once.

    checkpoint ─▶ engine ─▶ N episodes, batched as they come ─▶ success rate, interval ─▶ eval/<name>.json

Twice: sampled at `engine.temperature`, as in training, and greedy. An episode succeeds if its return is above
0. Draws depend on (seed, split, task), so that two policies meet the same luck. Planted faults (`env.faults`)
stay out of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from actors.build import build_engine, build_tools
from actors.turns import Tools, play, sample
from common.config import Config
from common.errors import ConfigError, EngineError, StorageError
from common.logs import fields, setup_logs
from common.manifest import sha256_of
from common.metrics import MetricsClient
from common.nouns import TaskId, TurnStatus, Version
from common.opening import MODEL_FILES, lacks
from common.progress import success_on
from common.rundir import RunDir
from common.seeds import derive_seed, turn_seed
from common.tokenizer import WordTokenizer

LOG = logging.getLogger("treeward.eval")

ROLE = "eval"
Z_95 = 1.959963984540054
"""Quantile of the normal distribution for a two-sided 95 % interval."""
MANIFEST = "manifest.json"
AHEAD = 2
"""Episodes under way for each row of the engine's batch: while some are in their worlds, others generate."""


@dataclass(frozen=True, slots=True)
class Episode:
    """One task's result."""

    task: int
    """Index within the split."""
    success: bool
    reward: float
    turns: int
    tokens: int
    ending: str


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Episodes in the order of their tasks."""

    episodes: tuple[Episode, ...]

    @property
    def successes(self) -> int:
        return sum(episode.success for episode in self.episodes)

    @property
    def success(self) -> float:
        return self.successes / len(self.episodes)

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the success rate."""
        return wilson(self.successes, len(self.episodes))

    def mean(self, name: str) -> float:
        """Mean of a number over the episodes: `turns`, `tokens` or `reward`."""
        return sum(float(getattr(episode, name)) for episode in self.episodes) / len(self.episodes)

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready."""
        low, high = self.interval
        return {
            "success": self.success,
            "low": low,
            "high": high,
            "tasks": len(self.episodes),
            "successes": self.successes,
            "mean_turns": self.mean("turns"),
            "mean_tokens": self.mean("tokens"),
            "per_task": [dataclasses.asdict(episode) for episode in self.episodes],
        }


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a success rate (Wilson 1927); unlike the normal one it stays within [0, 1]."""
    rate, z2 = successes / trials, Z_95**2
    middle = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z_95 * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


async def evaluate_tasks(tools: Tools, tasks: Sequence[TaskId], seed: int) -> EvalResult:
    """One episode of each task, as many at once as keep the engine's batch full.

    Raises:
        EnvironmentFault, EngineError, ConfigError: an episode cannot be played; that is no failure of the
            policy.
    """
    gate = asyncio.Semaphore(AHEAD * tools.engine.capabilities.max_batch)

    async def one(task: TaskId) -> Episode:
        async with gate:
            return await _episode(tools, task, derive_seed("eval", seed, task.split, task.index))

    return EvalResult(tuple(await asyncio.gather(*(one(task) for task in tasks))))


async def _episode(tools: Tools, task: TaskId, seed: int) -> Episode:
    session, reward, turns, tokens = str(task), 0.0, 0, 0
    status = TurnStatus.OPEN
    try:
        with tools.worlds.borrow(task) as world:
            context = np.asarray(tools.tokenizer.encode(world.reset(task)), dtype=np.int32)
            while status is TurnStatus.OPEN:
                draws = turn_seed(seed, turns)
                generation = await sample(tools, session, context, draws)
                played = play(tools, world, generation, context, draws)
                context, status = played.context, played.status
                reward += played.step.reward
                turns, tokens = turns + 1, tokens + len(generation.ids)
    finally:
        tools.engine.release(session)
    return Episode(task.index, reward > 0, reward, turns, tokens, status.value)


def evaluate(config: Config, folder: Path, *, greedy: bool) -> EvalResult:
    """Evaluate the model in `folder` on the tasks that `config.eval` names.

    Raises:
        StorageError: the folder holds no model, or one that is damaged or that the engine cannot load.
        ConfigError: the model does not know the environment's words.
    """
    _check_model(folder)
    return asyncio.run(_evaluate(config, folder, greedy))


async def _evaluate(config: Config, folder: Path, greedy: bool) -> EvalResult:
    plain = dataclasses.replace(config, env=dataclasses.replace(config.env, faults=0.0))
    with _blaming(folder):
        engine = build_engine(plain, folder, greedy=greedy)
    try:
        with _blaming(folder):
            await engine.load_weights(Version(0, 0), folder)
            tokenizer = WordTokenizer.load(folder)
        tools = dataclasses.replace(build_tools(plain, engine, tokenizer), features=False)
        tasks = [TaskId(config.env.name, config.eval.split, index) for index in range(config.eval.tasks)]
        return await evaluate_tasks(tools, tasks, config.seed)
    finally:
        await engine.close()


@contextlib.contextmanager
def _blaming(folder: Path) -> Iterator[None]:
    """What fails while a model is loaded is the fault of its folder, hence a `StorageError`."""
    try:
        yield
    except (ConfigError, EngineError) as error:
        raise StorageError(
            f"the model in {folder} cannot be evaluated: {error}; take another one, or a sound copy of it"
        ) from error


def run_eval(config: Config, rundir: RunDir) -> int:
    """Evaluate a checkpoint of the run, write `eval/<name>.json`, print one line; returns the exit code.

    Raises:
        StorageError: there is nothing to evaluate.
    """
    folder = Path(config.eval.checkpoint) if config.eval.checkpoint else newest_model(config, rundir)
    name = config.eval.name or eval_name(folder)
    setup_logs(ROLE, rundir.log_file(f"{ROLE}-{name}"), run=rundir.id)
    began = time.monotonic()
    results = {mode: evaluate(config, folder, greedy=mode == "greedy") for mode in ("sampled", "greedy")}
    plain = {mode: result.to_plain() for mode, result in results.items()}
    seconds = time.monotonic() - began
    about = {"name": name, "checkpoint": str(folder), "split": config.eval.split, "seed": config.seed}
    rundir.write_json_atomic(rundir.eval_file(name), {**about, "seconds": seconds, **plain})
    _log_metrics(config, rundir, name, step_of(folder), results)
    sampled, greedy = (shown(results[mode]) for mode in ("sampled", "greedy"))
    LOG.info("evaluated %s in %.1f s", folder, seconds, extra=fields("evaluated", **about))
    rates = f"sampled {sampled}, greedy {greedy}"
    print(f"{success_on(config.eval.split)} {rates} ({config.eval.tasks} tasks, {folder})", flush=True)
    return 0


def shown(result: EvalResult) -> str:
    """`0.62 [0.55, 0.68]`."""
    low, high = result.interval
    return f"{result.success:.2f} [{low:.2f}, {high:.2f}]"


def _log_metrics(
    config: Config, rundir: RunDir, name: str, step: int, results: dict[str, EvalResult]
) -> None:
    endpoint = config.cluster.tracker if config.tracking.enabled else ""
    metrics = MetricsClient(endpoint, ROLE, name, run=rundir.id, security=config.security)
    for mode, result in results.items():
        low, high = result.interval
        values = {"success": result.success, "low": low, "high": high, "turns": result.mean("turns")}
        metrics.log(step, **{f"{mode}_{key}": value for key, value in values.items()})
    metrics.close()


# ------------------------------------------------------------------------------------------ which model


def newest_model(config: Config, rundir: RunDir) -> Path:
    """The newest sound checkpoint of the run, else its warm start, else the model it starts from.

    Raises:
        StorageError: there is none of the three.
    """
    for folder in sorted(rundir.checkpoints.glob("step-*"), reverse=True):
        if is_sound(folder):
            return folder
        LOG.warning("%s is damaged or not complete; taking the one before it", folder)
    for folder in (rundir.warmstart_model, Path(config.model.path or rundir.warmstart_model)):
        if not lacks(folder):
            return folder
    raise StorageError(
        f"{rundir.path} holds neither a checkpoint nor a warm start to evaluate; train first, or name a "
        "model with eval.checkpoint="
    )


def is_sound(folder: Path) -> bool:
    """Whether a checkpoint's model has the bytes its manifest says."""
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(sha256_of(folder / name) == entries[name]["sha256"] for name in MODEL_FILES)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_model(folder: Path) -> None:
    """Raise `StorageError` unless `folder` holds a model, and the one that its manifest describes."""
    missing = lacks(folder)
    if missing:
        raise StorageError(
            f"{folder} holds no model: it lacks {', '.join(missing)}; give eval.checkpoint a folder"
        )
    if (folder / MANIFEST).exists() and not is_sound(folder):
        raise StorageError(
            f"the checkpoint {folder} is damaged: its files are not those that its {MANIFEST} describes; "
            "take another checkpoint, or a sound copy of it"
        )


def eval_name(folder: Path) -> str:
    """Name of a result made from its model: `warmstart`, or `step-00000012`."""
    return "warmstart" if folder.name == "model" else folder.name


def step_of(folder: Path) -> int:
    """The update a checkpoint was made at; 0 for a warm start or a model from elsewhere."""
    number = folder.name.removeprefix("step-")
    return int(number) if number.isdigit() else 0
