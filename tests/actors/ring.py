"""An actor's process within the test's own, and tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors.main import Actor
from common.config import ClusterConfig, Config, EngineConfig, Role, TrackingConfig, config_hash
from common.journal import read_journal
from common.messages import Finished, Grant, Welcome
from common.nouns import Version
from common.tokenizer import WordTokenizer
from tests.actors.fakes import LAKE, TOKENIZER, FakeEngine, random_walk, root_lease
from tests.actors.servers import FakeAllocator, FakeWeights, until

V1 = Version(0, 1)


class Ring:
    """One actor between a fake allocator and a fake learner."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.engine = FakeEngine(random_walk(TOKENIZER))
        self.engine.version = None
        monkeypatch.setattr("actors.main.build_engine", lambda config, path: self.engine)
        self.weights = FakeWeights(chunk=1000)
        self.publish(V1)
        self.tokenizer_hash = ""

    def publish(self, version: Version, tokenizer: WordTokenizer = TOKENIZER) -> None:
        text = tokenizer.to_json().encode()
        self.weights.add(version, config_json=b"{}", model_safetensors=b"m" * 5000, tokenizer_json=text)

    def config(self) -> Config:
        cluster = ClusterConfig(
            allocator=self.allocator.endpoint, heartbeat_s=0.05, dead_after_s=0.3, connect_timeout_s=10.0
        )
        return Config(
            role=Role.ACTOR,
            env=LAKE,
            engine=EngineConfig(max_batch=8, prefetch=8),
            cluster=cluster,
            tracking=TrackingConfig(enabled=False),
        )

    def welcome(self, version: Version | None = V1) -> Welcome:
        endpoint, hints = (self.weights.endpoint, self.weights.hints) if version else ("", "")
        config = self.config()
        return Welcome(
            "run", config_hash(config), self.tokenizer_hash, endpoint, hints, version, 0.05, 0.3, 0, False
        )

    async def __aenter__(self) -> Ring:
        await self.weights.open()
        self.allocator = FakeAllocator(None)  # type: ignore[arg-type]
        await self.allocator.open()
        self.allocator.welcome = self.welcome()
        self.actor = Actor(self.config(), "a", self.folder)
        self.task = asyncio.create_task(self.actor.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.allocator.close()
        await self.weights.close()

    async def grant(self, *numbers: int, version: Version = V1, **changes: Any) -> None:
        leases = [root_lease(LAKE, TOKENIZER, number=n, index=n, **changes) for n in numbers]
        await self.allocator.send(Grant(leases, version, self.weights.endpoint))

    async def greeted(self) -> None:
        await until(lambda: bool(self.allocator.hellos), what="a hello")

    async def finished(self, *numbers: int) -> None:
        wanted = set(numbers)
        await until(lambda: wanted <= {m.lease.number for m in self.allocator.of(Finished)}, what="the ends")

    def journal(self) -> list[str]:
        return [record.kind for record in read_journal(self.folder / "journal.tw")]


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine, which has 40 s to come to its end."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), 40))

    return run
