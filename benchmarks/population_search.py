"""The allocator's own core over a population: a world without time, one wave of prompts after the other.

    AllocatorCore ── Inspect, Grant ──▶ instant actor: population.root, step ── Inspected … Finished ──▶ core
                  ── TreeReady ──────▶ instant learner: takes whole waves, changes nothing ── Consumed ─▶ core

Rules, budgets, predictors, the order of their updates: all of it is the core's, nothing is copied. The
actor answers before anything else happens, the policy lag is 0, so this is the synchronous search. Measured:
a third slower than calling the forest directly, which would leave the granting of leases to a copy.
"""

from __future__ import annotations

import struct
from collections import deque

from allocator.budgets.base import Budget
from allocator.core import AllocatorCore
from allocator.rules.base import Rule
from allocator.settings import Settings
from benchmarks.population import Population, State
from common.messages import (
    PROTOCOL_VERSION,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Expanded,
    Finished,
    Grant,
    Hello,
    HorizonReached,
    Inspect,
    Inspected,
    Message,
    Starting,
    TreeReady,
)
from common.nouns import (
    ROOT,
    Ending,
    Lease,
    LeaseId,
    Outcome,
    RewardSource,
    Tree,
    Turn,
    TurnStatus,
    Version,
    VersionRun,
)
from common.predictor import Predictor
from common.seeds import turn_seed

START = Version(0, 0)
NOW = 0.0
"""Seconds. Nothing takes any time."""
ACTOR, LEARNER = "actor/0", "learner/0"
SLOTS = 64
STEPS = 1 << 20
"""More waves than anybody asks for."""


class Search:
    """One run over a population, wave by wave.

    Args:
        population: the world.
        rule, budget, predictor: of the allocator.
        batch: prompts of a wave that are trained on; a budget with candidates chooses them among more.
        seed: of the run; runs of one seed meet the same prompts, and root continuations the same draws.
        first: prompts to leave out, for a run that meets those of another one's later waves.
        hidden: filled with the states of the wave, by their features, of which no two are alike: how an
            oracle finds what it sees.
    """

    def __init__(
        self,
        population: Population,
        rule: Rule,
        budget: Budget,
        predictor: Predictor,
        *,
        batch: int,
        seed: int,
        first: int = 0,
        hidden: dict[bytes, State] | None = None,
    ) -> None:
        settings = Settings(
            seed=seed, batch_trees=batch, steps=STEPS, max_policy_lag=0, max_score_staleness=0,
            env=population.name,
        )  # fmt: skip
        self.population = population
        self.hidden = {} if hidden is None else hidden
        self.core = AllocatorCore(settings, rule, budget, predictor)
        self._batch, self._first = batch, first
        self._states: dict[tuple[int, int], State] = {}
        """By tree and node, numbered as they arrive."""
        self._nodes: dict[int, int] = {}
        """Nodes of each tree."""
        self._inbox: deque[Message] = deque()
        """Of the actor."""
        self._ready: list[Tree] = []
        self._step = 0
        can = Capabilities(slots=SLOTS, process_scores=True)
        self._say(ACTOR, Hello("actor", "actor", "0", PROTOCOL_VERSION, can, {}))

    def wave(self) -> list[Tree]:
        """Grow the next wave; returns its trees, by id.

        Raises:
            RuntimeError: the core stands still, or its rule waits though nothing is outstanding.
        """
        if self._step == 0:
            hello = Hello("learner", "learner", "0", PROTOCOL_VERSION, Capabilities(), {}, version=START)
            self._say(LEARNER, hello)
            self._say(LEARNER, Credit(STEPS * self._batch))
        while self._inbox:
            self._work(self._inbox.popleft())
        done, self._ready = self._ready, []
        if len(done) != self._batch:
            raise RuntimeError(f"wave {self._step} stands still after {len(done)} of {self._batch} trees")
        self._forget()
        self._step += 1
        version, numbers = Version(0, self._step), [tree.id for tree in done]
        self._say(LEARNER, Consumed(numbers, version))
        self._say(LEARNER, Committed(version, numbers))
        return sorted(done, key=lambda tree: tree.id)

    def _forget(self) -> None:
        """States and records of the wave; before the next one is set up."""
        self.hidden.clear()
        self._states.clear()
        self._nodes.clear()
        self.core.take_records()

    def _say(self, peer: str, message: Message) -> None:
        for send in self.core.handle(peer, message, NOW).sends:
            if isinstance(send.message, TreeReady):
                self._ready.append(send.message.tree)
            elif send.peer == ACTOR:
                self._inbox.append(send.message)

    # --- the actor ---------------------------------------------------------------------------------------

    def _work(self, message: Message) -> None:
        if isinstance(message, Inspect):
            root = self.population.root(message.task.index + self._first)
            self._states[message.tree, ROOT] = root
            self._say(ACTOR, Inspected(message.tree, message.task, self._root_turn(root)))
        elif isinstance(message, Grant):
            for lease in message.leases:
                self._run(lease)

    def _run(self, lease: Lease) -> None:
        """A lease to the end of its episode, or to its horizon."""
        state = self._states[lease.id.tree, lease.anchor]
        self._say(ACTOR, Starting(lease.id, START))
        turns = 0
        while state.success is None and not (lease.horizon and turns == lease.horizon):
            seed = turn_seed(lease.seed, turns)
            state = self._turn(lease.id, turns, self.population.step(state, seed), seed)
            turns += 1
        if state.success is None:
            self._say(ACTOR, HorizonReached(lease.id, turns))
            return
        reward = float(state.success)
        said = Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED)
        self._say(ACTOR, Finished(lease.id, turns, said))

    def _turn(self, lease: LeaseId, offset: int, state: State, seed: int) -> State:
        index = self._nodes[lease.tree] = self._nodes.get(lease.tree, ROOT) + 1
        self._states[lease.tree, index] = state
        self._say(ACTOR, Expanded(lease, offset, self._turn_of(state, seed)))
        return state

    # --- what it sees ------------------------------------------------------------------------------------

    def _root_turn(self, state: State) -> Turn:
        seen = self.population.observables(state)
        self.hidden[seen.features] = state
        return Turn(process_score=seen.process_score, features=seen.features)

    def _turn_of(self, state: State, seed: int) -> Turn:
        zeros = b"\0\0\0\0" * state.tokens
        versions, text = [VersionRun(START, state.tokens)], f"{seed:x}"
        if state.success is not None:
            return Turn(
                action=zeros, logprobs=zeros, entropies=zeros, versions=versions, action_text=text, seed=seed,
                status=TurnStatus.TERMINATED, reward=float(state.success),
            )  # fmt: skip
        seen = self.population.observables(state)
        self.hidden[seen.features] = state
        return Turn(
            action=zeros, logprobs=struct.pack("<f", -surprisal(seen.entropy, seed)) * state.tokens,
            entropies=struct.pack("<f", seen.entropy) * state.tokens,
            versions=versions, action_text=text, seed=seed,
            process_score=seen.process_score, features=seen.features,
        )  # fmt: skip


def surprisal(entropy: float, seed: int) -> float:
    """−log p of each token of a turn, nats: its mean over turns is the entropy, a turn's own is anywhere
    between a half and one and a half of it."""
    return entropy * (0.5 + (seed & 0xFFFF) / 0x10000)
