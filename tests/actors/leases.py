"""One lease run to its end within the test's own process, and the lease that goes on where it stood."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from actors.expand import expand
from actors.lease_table import Attempt
from actors.turns import Tools
from common.config import EnvConfig
from common.messages import Expanded, Message
from common.nouns import Lease, LeaseId, Segment, TaskId
from tests.actors.fakes import TOKENIZER, FakeEngine, make_tools, make_world, random_walk, root_lease


def run(lease: Lease, tools: Tools, attempt: Attempt | None = None) -> list[Message]:
    """Everything one lease reports."""
    sent: list[Message] = []
    asyncio.run(expand(attempt or Attempt(lease, 0.0), tools, sent.append))
    return sent


def walk(config: EnvConfig, **changes: Any) -> tuple[Lease, FakeEngine, list[Message]]:
    """A lease of random actions, the engine that was asked for them, and what was reported."""
    engine = FakeEngine(random_walk(TOKENIZER))
    lease = root_lease(config, TOKENIZER, **changes)
    return lease, engine, run(lease, make_tools(engine, config))


def turns(sent: list[Message]) -> list[Expanded]:
    return [message for message in sent if isinstance(message, Expanded)]


def resumed(lease: Lease, done: list[Expanded], epoch: int = 1) -> Lease:
    """The lease that an allocator grants after `done` turns were accepted."""
    prefix = lease.prefix + b"".join(m.turn.action + m.turn.observation for m in done)
    history = [*lease.history, *(Segment(m.turn.action_text, m.turn.seed) for m in done)]
    return msgspec.structs.replace(
        lease,
        id=LeaseId(lease.id.tree, lease.id.number, epoch),
        prefix=prefix,
        history=history,
        snapshot=done[-1].turn.snapshot if done else lease.snapshot,
        state_hash=done[-1].turn.state_hash if done else lease.state_hash,
        depth=lease.depth + len(done),
        offset=lease.offset + len(done),
    )


def reaching(config: EnvConfig, index: int) -> list[str]:
    """A way to the goal of this train task."""
    world = make_world(config)
    world.reset(TaskId("frozenlake", "train", index))
    path: list[str] = []
    while (action := world.expert_action()) is not None:
        path.append(action)
        world.step(action, 0)
    return path
