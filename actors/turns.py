"""One turn of an episode: sample an action, play it, describe what happened.

    context ids ─engine─▶ action ids ─decode─▶ text ─world─▶ Step ─encode─▶ observation ids ─▶ Turn

Tokens in, tokens out: the next context is this one plus the action ids plus the observation ids. What was
sampled is decoded once, for the world to read, and never encoded again. Masks come from these spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from actors.engines.base import Engine, GenerateRequest, Generation, Ids, StopReason
from actors.restore import Worlds, as_fault
from common.errors import EnvironmentFault
from common.messages import Inspected
from common.nouns import (
    TaskId,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
    floats_to_bytes,
    ids_to_bytes,
)
from common.tokenizer import WordTokenizer
from envs.base import Environment, ReplayEnvironment, Step


@dataclass(frozen=True, slots=True)
class Tools:
    """What every episode of a process works with."""

    engine: Engine
    tokenizer: WordTokenizer
    worlds: Worlds
    temperature: float
    max_new_tokens: int
    features: bool = False
    """Whether prefixes are described (one more short forward pass a turn)."""

    def has_room(self, context: Ids) -> bool:
        """Whether one more turn fits into the engine's context."""
        return len(context) + self.max_new_tokens <= self.engine.capabilities.max_context


async def sample(tools: Tools, session: str, context: Ids, seed: int) -> Generation:
    """Sample one action after `context`; may raise `EngineError`."""
    return await tools.engine.generate(
        GenerateRequest(
            session=session,
            context=context,
            max_new_tokens=tools.max_new_tokens,
            seed=seed,
            temperature=tools.temperature,
            stop_ids=(tools.tokenizer.end_id,),
        )
    )


@dataclass(frozen=True, slots=True)
class Played:
    """One turn as it happened."""

    seed: int
    generation: Generation
    text: str
    """What the world read: the action without its stop token."""
    step: Step
    observation: Ids
    """[m]"""
    context: Ids
    """[n + k + m] all tokens up to the end of the observation."""
    status: TurnStatus

    @property
    def is_open(self) -> bool:
        return self.status is TurnStatus.OPEN


def play(tools: Tools, world: Environment, generation: Generation, context: Ids, seed: int) -> Played:
    """Play a sampled action in the world.

    Raises:
        EnvironmentFault: the world raised, or its reward is no finite number.
        ConfigError: it answered with a word that the tokenizer does not know.
    """
    sampled = generation.ids.tolist()
    text = tools.tokenizer.decode(sampled[:-1] if generation.stop_reason is StopReason.STOP else sampled)
    with as_fault(f"step {text!r}"):
        step = world.step(text, seed)
    if not math.isfinite(step.reward):
        raise EnvironmentFault(f"step {text!r} was rewarded with {step.reward}; expected a finite number")
    observation = np.asarray(tools.tokenizer.encode(step.observation), dtype=np.int32)
    longer = np.concatenate((context, generation.ids, observation))
    return Played(seed, generation, text, step, observation, longer, status_of(tools, step, longer))


def status_of(tools: Tools, step: Step, context: Ids) -> TurnStatus:
    """State of the world after a turn that led to `context`.

    An open turn after which no further one would fit into the engine's context is truncated here: an
    anchor there could not be continued.
    """
    if step.terminated:
        return TurnStatus.TERMINATED
    return TurnStatus.OPEN if not step.truncated and tools.has_room(context) else TurnStatus.TRUNCATED


def turn_of(played: Played, world: Environment, features: bytes | None) -> Turn:
    """The turn as it is reported, with the world still where the step left it.

    Raises:
        EnvironmentFault: the world raised while it was described.
    """
    generation = played.generation
    with as_fault(f"after step {played.text!r}"):
        return Turn(
            action=ids_to_bytes(generation.ids),
            logprobs=floats_to_bytes(generation.logprobs),
            entropies=floats_to_bytes(generation.entropies),
            versions=version_runs(generation.versions),
            observation=ids_to_bytes(played.observation),
            action_text=played.text,
            seed=played.seed,
            status=played.status,
            reward=played.step.reward,
            snapshot=snapshot_of(world) if played.is_open else None,
            state_hash=world.state_hash(),
            stop_reason=generation.stop_reason.value,
            process_score=world.process_score(),
            features=features,
        )


def version_runs(versions: Iterable[Version]) -> list[VersionRun]:
    """Run lengths of per-token versions."""
    return [VersionRun(version, len(list(run))) for version, run in groupby(versions)]


def snapshot_of(world: Environment) -> bytes | None:
    """The state as bytes; None where a snapshot is the history anyway, which every lease carries."""
    return None if isinstance(world, ReplayEnvironment) else world.snapshot()


async def features_of(tools: Tools, context: Ids, session: str | None = None) -> bytes | None:
    """Features of a prefix, [F] as bytes; None where they are switched off or the engine has none."""
    if not tools.features:
        return None
    vector = await tools.engine.features(context, session)
    return None if vector is None else floats_to_bytes(vector)


async def inspect_root(tree: int, task: TaskId, tools: Tools) -> Inspected:
    """Set `task` up and describe its root; samples nothing.

    Raises:
        ConfigError: the task is none of this environment's, or a word of its prompt is unknown.
        EnvironmentFault: the world raised, or the prompt leaves no room for a turn.
    """
    with tools.worlds.borrow(task) as world, as_fault(f"{task}: reset"):
        prompt = world.reset(task)
        snapshot, state_hash = snapshot_of(world), world.state_hash()
        process_score, gold = world.process_score(), world.gold_answer()
    context = np.asarray(tools.tokenizer.encode(prompt), dtype=np.int32)
    if not tools.has_room(context):
        raise EnvironmentFault(
            f"{task}: its prompt of {len(context)} tokens and engine.max_new_tokens={tools.max_new_tokens} "
            f"exceed the context of {tools.engine.capabilities.max_context}; raise model.max_context"
        )
    root = Turn(
        observation=ids_to_bytes(context),
        snapshot=snapshot,
        state_hash=state_hash,
        process_score=process_score,
        features=await features_of(tools, context),
    )
    return Inspected(tree, task, root, gold)
