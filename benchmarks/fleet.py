"""A simulated fleet: the real allocator core, and actors and a learner that exist only as events in a heap.

    core ◀──── messages, latency, losses, duplicates ────▶ SimActor × N   (slots, prefetch, failures, crashes)
         ◀──── Consumed, Committed, Credit ──────────────▶ SimLearner     (updates take time; may crash)
                                     World: what a continuation yields, and how long each turn takes

One seed is one history: the same seed gives the same events in the same order, hashed as they happen. Senders
behave as the real ones do: they repeat, in order, what was not acknowledged.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Handled, Record, Send, Settings
from allocator.rules import make_rule
from benchmarks.fleet_actors import SimActor
from benchmarks.fleet_config import Faults, FleetConfig
from benchmarks.fleet_learner import SimLearner
from benchmarks.fleet_worlds import CoinWorld, World
from common.config_allocator import BudgetConfig, RuleConfig, root_cost
from common.messages import Message
from common.nouns import Version
from common.predictor import Predictor
from common.seeds import derive_seed

__all__ = ["Faults", "Fleet", "FleetConfig", "SimActor", "SimLearner"]


class Fleet:
    """The event loop of the simulation; `run` returns what happened.

    Args:
        world: what continuations yield (default: the coin world).
        predictor: the core's success predictor (default: the history model).
    """

    def __init__(
        self,
        settings: Settings,
        config: FleetConfig,
        rule: RuleConfig,
        budget: BudgetConfig,
        seed: int = 0,
        *,
        world: World | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        self.config = config
        self.world = world or CoinWorld(config.max_turns)
        self.rng = random.Random(derive_seed("fleet", seed))
        shares = make_budget(budget, settings.batch_trees, root_cost(rule))
        self.core = AllocatorCore(settings, make_rule(rule), shares, predictor)
        self.now = 0.0
        self.events = 0
        """Messages and ticks the core handled."""
        self.over = False
        self.checkpoint_step = 0
        self.peers: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()
        self.audit_every = 0
        self.hashed = True
        """Whether the history is hashed; without, a simulation is a tenth faster."""
        self.learner = SimLearner(self, 0, Version(0, 0), set())
        self._hash = hashlib.blake2b(digest_size=16)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._occupied = 0
        self._occupied_s = 0.0
        self._occupied_at = 0.0

    def after(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, self._number, action))
        self._number += 1

    def latency(self) -> float:
        return self.config.latency_s * (0.5 + self.rng.random())

    def occupy(self, slots: int) -> None:
        """That many more slots run something from now on."""
        self._occupied_s += self._occupied * (self.now - self._occupied_at)
        self._occupied_at = self.now
        self._occupied += slots

    @property
    def slot_seconds(self) -> float:
        """Seconds of slots with something to run, so far."""
        return self._occupied_s + self._occupied * (self.now - self._occupied_at)

    def deliver(self, key: str, message: Message) -> Handled:
        """A message reaches the allocator."""
        handled = self.core.handle(key, message, self.now)
        self._after_input(key, message, handled.ack, handled.sends)
        return handled

    def heard(self, key: str, message: Message, ack: bool, records: list[Record]) -> None:
        """For those who look on: the core handled a message, and this is what it led to."""

    def arrived(self, peer: str, message: Message) -> None:
        """For those who look on: a message of the core reached a peer."""

    def _tick(self) -> None:
        self._after_input("", None, True, self.core.tick(self.now))
        if not self.over:
            self.after(self.config.tick_s, self._tick)

    def _after_input(self, key: str, message: Message | None, ack: bool, sends: list[Send]) -> None:
        self.events += 1
        records = self.core.take_records()
        if message is not None:
            self.heard(key, message, ack, records)
        for kind, _ in records:
            self.counts[kind] += 1
        if self.hashed:
            what = type(message).__name__
            self._hash.update(f"{self.now:.9f} {key} {what} {ack} {records}".encode())
        for send in sends:
            if self.rng.random() < self.config.faults.lost:
                self.counts["sends_delayed"] += 1  # the outbox of the real loop repeats it
                self.after(self.config.resend_s, lambda s=send: self._arrive(s))  # type: ignore[misc]
            else:
                self.after(self.latency(), lambda s=send: self._arrive(s))  # type: ignore[misc]
        if self.audit_every and self.events % self.audit_every == 0:
            self.check()
        if self.core.ending is not None:
            self.over = True

    def check(self) -> None:
        """The conservation law, or AssertionError naming what broke it."""
        found = self.core.audit()
        assert not found, f"after event {self.events} at {self.now:.3f} s: {found[:5]}"

    def _arrive(self, send: Send) -> None:
        peer = self.peers.get(send.peer)
        if peer is not None:
            self.arrived(send.peer, send.message)
            peer.receive(send.message)

    def _begin(self) -> None:
        self.after(0.0, self.learner.join)
        for index in range(self.config.actors):
            actor = SimActor(self, f"actor-{index}", 0)
            self.after(self.rng.uniform(0, self.config.join_over_s), actor.join)
        self.after(self.config.tick_s, self._tick)

    def run(
        self, max_events: int = 0, max_seconds: float = 0.0, until: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Simulate until the run ends, `max_events` or `max_seconds` (simulated) have passed in all, or
        `until` says so (asked before each event)."""
        began, cpu_began = time.perf_counter(), time.process_time()
        if self.events == 0:
            self._begin()
        while self._heap and not (max_events and self.events >= max_events):
            if max_seconds and self._heap[0][0] > max_seconds:
                break
            if until is not None and until():
                break
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if self.over and self.core.live_leases == 0:
                break
        seconds = time.perf_counter() - began
        return {
            "events": self.events,
            "seconds": seconds,
            "cpu_seconds": time.process_time() - cpu_began,
            "events_per_s": self.events / seconds,
            "simulated_s": self.now,
            "history": self._hash.hexdigest(),
            "ended": self.core.ending is not None,
            "audit": self.core.audit(),
            "counts": dict(self.counts),
            "stats": self.core.stats(),
        }
