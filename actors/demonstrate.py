"""Demonstrations for the warm start: trees of one chain each, played by a scripted expert that errs.

    expert + noise ─▶ world ─▶ Tree (demonstration=True, no log-probabilities) ─▶ warmstart/demos.tw
    words of the world ─────────────────────────────────────────────────────────▶ warmstart/tokenizer.json

Each record of `demos.tw` has kind `tree` and the tree as its field `tree`. Tasks are of the split `train`,
from `FIRST_TASK` on: other tasks than those trained on later, and no map of the held-out split.
"""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np

from actors.build import check_vocabulary
from actors.restore import as_fault, env_factory
from actors.turns import snapshot_of
from common.config import Config
from common.errors import StorageError
from common.journal import JournalWriter, fsync_dir
from common.logs import fields, setup_logs
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    Continuation,
    Ending,
    Node,
    Outcome,
    RewardSource,
    TaskId,
    Tree,
    Turn,
    TurnStatus,
    Version,
    ids_to_bytes,
)
from common.rundir import RunDir, write_bytes_atomic
from common.seeds import derive_seed, task_index, turn_seed
from common.tokenizer import FILE_NAME, WordTokenizer
from envs.base import Environment
from envs.experts import noisy_action

LOG = logging.getLogger("treeward.warmstart")

ROLE = "demonstrate"
SPLIT = "train"
FIRST_TASK = 1 << 40
"""Training's tasks lie below (see `common.seeds.task_index`)."""
KIND = "tree"


def write_demonstrations(config: Config, rundir: RunDir) -> Path:
    """Write `warmstart.demonstrations` trees and their tokenizer; what was there before is replaced.

    Returns:
        The file of the trees.

    Raises:
        ConfigError: the environment has no expert.
        StorageError: the disk refuses.
    """
    setup_logs(ROLE, rundir.log_file(ROLE), run=rundir.id)
    world = env_factory(config.env)()
    tokenizer = WordTokenizer.build(world.words)
    check_vocabulary(world, tokenizer)
    write_bytes_atomic(rundir.warmstart / FILE_NAME, tokenizer.to_json().encode())
    path = rundir.demonstrations_file
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    won = 0
    with JournalWriter(part) as journal:
        for number in range(config.warmstart.demonstrations):
            tree = demonstrate(world, tokenizer, number, config.warmstart.noise, config.seed)
            won += any(leaf.outcome.reward > 0 for leaf in tree.leaves() if leaf.outcome is not None)
            journal.append(KIND, tree=tree)
    try:
        part.replace(path)
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"cannot write the demonstrations {path}: {error.strerror}") from error
    world.close()
    count = config.warmstart.demonstrations
    LOG.info("%d demonstrations, %d of them succeed", count, won, extra=fields("demonstrated", won=won))
    return path


def demonstrate(world: Environment, tokenizer: WordTokenizer, number: int, noise: float, seed: int) -> Tree:
    """One chain of the expert on its own task; everything in it follows from (seed, number)."""
    task = TaskId(world.name, SPLIT, FIRST_TASK + task_index(seed, number))
    chain_seed = derive_seed("demonstration", seed, number)
    rng = random.Random(chain_seed)
    with as_fault(f"{task}: demonstration"):
        prompt = world.reset(task)
        nodes = [_node(0, Turn(observation=_ids(tokenizer, prompt), **_state(world, TurnStatus.OPEN)))]
        reward = 0.0
        while nodes[-1].turn.status is TurnStatus.OPEN:
            turn = _turn(
                world, tokenizer, noisy_action(world, noise, rng), turn_seed(chain_seed, len(nodes) - 1)
            )
            reward += turn.reward
            nodes.append(_node(len(nodes), turn))
    return _tree(number, task, nodes, reward)


def _turn(world: Environment, tokenizer: WordTokenizer, action: str, seed: int) -> Turn:
    """Play a turn; its action ends with the stop token, as a sampled one would."""
    step = world.step(action, seed)
    status = TurnStatus.OPEN
    if step.is_over:
        status = TurnStatus.TERMINATED if step.terminated else TurnStatus.TRUNCATED
    return Turn(
        action=ids_to_bytes([*tokenizer.encode(action), tokenizer.end_id]),
        observation=_ids(tokenizer, step.observation),
        action_text=action,
        seed=seed,
        reward=step.reward,
        stop_reason="stop",
        demonstration=True,
        **_state(world, status),
    )


def _state(world: Environment, status: TurnStatus) -> dict[str, Any]:
    return {
        "status": status,
        "snapshot": snapshot_of(world) if status is TurnStatus.OPEN else None,
        "state_hash": world.state_hash(),
        "process_score": world.process_score(),
    }


def _ids(tokenizer: WordTokenizer, text: str) -> bytes:
    return ids_to_bytes(np.asarray(tokenizer.encode(text), dtype=np.int32))


def _node(index: int, turn: Turn) -> Node:
    """Node of a chain: node 0 is the prompt, all others belong to continuation 0."""
    owner, offset = (NO_LEASE, 0) if index == 0 else (0, index - 1)
    return Node(index, index - 1 if index else NO_PARENT, owner, offset, index, turn)


def _tree(number: int, task: TaskId, nodes: list[Node], reward: float) -> Tree:
    terminated = nodes[-1].turn.status is TurnStatus.TERMINATED
    ending = Ending.TERMINATED if terminated else Ending.TRUNCATED
    chain = Continuation(
        number=0,
        anchor=0,
        nodes=list(range(1, len(nodes))),
        weight=1.0,
        baseline=None,
        predictor_version=0,
        score_stamp=0,
        speculative=False,
        outcome=Outcome(reward, reward, RewardSource.ENVIRONMENT, ending),
        ended="finished",
    )
    return Tree(number, task, 0, nodes, [chain], 1.0, Version(0, 0), demonstration=True)
