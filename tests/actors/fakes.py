"""An engine without a model, worlds and leases for the actors' tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from actors.engines.base import (
    Engine,
    EngineCapabilities,
    Floats,
    GenerateRequest,
    Generation,
    Ids,
    StopReason,
)
from actors.restore import Worlds, env_factory
from actors.turns import Tools
from common.config import EnvConfig
from common.errors import EngineError
from common.nouns import Lease, LeaseId, TaskId, Version
from common.tokenizer import WordTokenizer
from envs.base import Environment

Policy = Callable[[list[int], int], list[int]]
"""(context, seed) -> sampled ids."""

ACTIONS = ("left", "down", "right", "up")


class FakeEngine(Engine):
    """Answers with what `policy` says; records every request."""

    def __init__(self, policy: Policy, *, max_context: int = 256, features: int = 0) -> None:
        self.policy = policy
        self.requests: list[GenerateRequest] = []
        self.described: list[list[int]] = []
        self.released: list[str] = []
        self.loaded: list[tuple[Version, list[str]]] = []
        self.aborted: set[str] = set()
        self.hold: asyncio.Event | None = None
        """Set it to an event to keep every generation waiting for it, or for an abort."""
        self.dead = False
        self._version: Version | None = Version(0, 0)
        self._wake = asyncio.Event()
        self._capabilities = EngineCapabilities("fake", max_context, 64, True, features, True, True)

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    @property
    def version(self) -> Version | None:
        return self._version

    @version.setter
    def version(self, version: Version | None) -> None:
        self._version = version

    async def generate(self, request: GenerateRequest) -> Generation:
        if self.dead:
            raise EngineError("the engine died")
        self.requests.append(request)
        sampled = self.policy(request.context.tolist(), request.seed)[: request.max_new_tokens]
        await asyncio.sleep(0)
        while self.hold is not None and not self.hold.is_set() and request.session not in self.aborted:
            await asyncio.sleep(0.001)
        if request.session in self.aborted:
            return self._generation(sampled[:1], StopReason.ABORTED)
        stopped = sampled[-1] in request.stop_ids
        return self._generation(sampled, StopReason.STOP if stopped else StopReason.LENGTH)

    def _generation(self, sampled: list[int], reason: StopReason) -> Generation:
        count = len(sampled)
        assert self._version is not None
        logprobs = -np.linspace(0.25, 0.5, count, dtype=np.float32)
        entropies = np.full(count, 0.75, dtype=np.float32)
        return Generation(
            np.asarray(sampled, dtype=np.int32), logprobs, entropies, (self._version,) * count, reason
        )

    async def score(self, context: Ids, targets: Ids) -> Floats:
        return np.full(len(targets), -1.0, dtype=np.float32)

    async def features(self, context: Ids, session: str | None = None) -> Floats | None:
        self.described.append(context.tolist())
        width = self._capabilities.features
        return np.full(width, float(len(context)), dtype=np.float32) if width else None

    async def load_weights(self, version: Version, directory: Path) -> None:
        self.loaded.append((version, sorted(path.name for path in directory.iterdir())))
        self._version = version

    def release(self, session: str) -> None:
        self.released.append(session)

    def abort(self, session: str) -> None:
        self.aborted.add(session)

    async def close(self) -> None:
        self.dead = True


def lake(**options: object) -> EnvConfig:
    """A small lake."""
    return EnvConfig(**{"size": 4, "hole_probability": 0.2, "max_turns": 8, **options})  # type: ignore[arg-type]


def make_world(config: EnvConfig) -> Environment:
    return env_factory(config)()


LAKE = lake()
TOKENIZER = WordTokenizer.build(make_world(LAKE).words)


def make_tools(engine: Engine, config: EnvConfig, max_new_tokens: int = 4) -> Tools:
    """Tools around `engine` with the tokenizer of the configured world."""
    make = env_factory(config)
    tokenizer = WordTokenizer.build(make().words)
    features = engine.capabilities.features > 0
    return Tools(engine, tokenizer, Worlds(make, config.faults), 1.0, max_new_tokens, features)


def random_walk(tokenizer: WordTokenizer, nonsense: float = 0.1) -> Policy:
    """Random actions that depend on the seed alone; now and then one that no world understands."""

    def policy(context: list[int], seed: int) -> list[int]:
        rng = random.Random(seed)
        if rng.random() < nonsense:
            return tokenizer.encode("lake up lake up lake")
        return [*tokenizer.encode(rng.choice(ACTIONS)), tokenizer.end_id]

    return policy


def scripted(tokenizer: WordTokenizer, *actions: str) -> Policy:
    """These actions one after another, whoever asks."""
    rest = list(actions)
    return lambda context, seed: [*tokenizer.encode(rest.pop(0)), tokenizer.end_id]


def always(tokenizer: WordTokenizer, action: str) -> Policy:
    """This action, whoever asks."""
    return lambda context, seed: [*tokenizer.encode(action), tokenizer.end_id]


def root_lease(
    config: EnvConfig,
    tokenizer: WordTokenizer,
    *,
    index: int = 0,
    tree: int = 0,
    number: int = 0,
    epoch: int = 0,
    **changes: object,
) -> Lease:
    """A lease at the root of train task `index`."""
    task = TaskId("frozenlake", "train", index)
    world = make_world(config)
    prompt = tokenizer.encode(world.reset(task))
    fields: dict[str, object] = {
        "id": LeaseId(tree, number, epoch),
        "task": task,
        "anchor": 0,
        "prefix": np.asarray(prompt, dtype="<i4").tobytes(),
        "snapshot": world.snapshot(),
        "history": [],
        "state_hash": world.state_hash(),
        "depth": 0,
        "offset": 0,
        "seed": 1234 + 17 * tree + number,
        "horizon": 0,
        "score_stamp": 0,
        "weight": 1.0,
        "baseline": None,
        "predictor_version": 0,
        "min_version": Version(0, 0),
        "deadline_s": 30.0,
    }
    return Lease(**{**fields, **changes})  # type: ignore[arg-type]
