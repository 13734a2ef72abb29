"""What all parts of the core share: its books, its clock, and the messages and records it is about to
emit."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec

from allocator.budgets.base import Budget
from allocator.delivery import Delivery
from allocator.forest import Forest
from allocator.leases import LeaseBook
from allocator.peers import PeerTable
from allocator.rules.base import Rule
from allocator.settings import Settings
from allocator.tree import GrowingTree
from allocator.waves import Waves
from common.messages import Message
from common.nouns import Version
from common.predictor import Predictor

Record = tuple[str, dict[str, Any]]
"""A journal record: kind and fields."""


class Send(msgspec.Struct, frozen=True):
    """One message to one peer (`name/incarnation`)."""

    peer: str
    message: Message


class Handled(msgspec.Struct, frozen=True):
    """What came of a message. `ack` False = the sender must send it again, in order, or say hello."""

    sends: list[Send]
    ack: bool


@dataclass(frozen=True, slots=True)
class Exit:
    """Why the run is over, and the exit code of this process."""

    code: int
    reason: str


class CoreState:
    """The books of one run. Nothing here reads a clock: `now` is set by the caller, in seconds, monotonic."""

    def __init__(self, settings: Settings, rule: Rule, budget: Budget, predictor: Predictor) -> None:
        self.settings = settings
        self.rule = rule
        self.budget = budget
        self.predictor = predictor
        self.peers = PeerTable()
        self.leases = LeaseBook(self.peers)
        self.forest = Forest(settings, rule, budget, predictor)
        self.delivery = Delivery(settings, budget.candidates * settings.batch_trees if budget.pooled else 0)
        self.waves = Waves(predictor, budget, settings.batch_trees)
        self.now = 0.0
        self.version: Version | None = None
        """Newest weights, None until a learner has said hello."""
        self.weights_endpoint = ""
        self.hints_endpoint = ""
        self.tokenizer_hash = ""
        self.ending: Exit | None = None
        self.learner_since = 0.0
        """Since when there is no learner (while there is none)."""
        self.uninspected: deque[GrowingTree] = deque()
        """Open trees that nobody sets up at the moment."""
        self.counts: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.sends: list[Send] = []
        self.records: list[Record] = []
        self.departed: list[str] = []
        self._timers: list[tuple[float, int, str, Any, int]] = []
        self._timer_number = 0

    def send(self, peer: str, message: Message) -> None:
        self.sends.append(Send(peer, message))

    def record(self, kind: str, /, **fields: Any) -> None:
        self.records.append((kind, fields))

    def take_sends(self) -> list[Send]:
        sends, self.sends = self.sends, []
        return sends

    def remind(self, when: float, kind: str, subject: Any, epoch: int = 0) -> None:
        """Come back to `subject` at `when`; whoever answers checks whether it still matters."""
        heapq.heappush(self._timers, (when, self._timer_number, kind, subject, epoch))
        self._timer_number += 1

    def next_due(self) -> tuple[str, Any, int] | None:
        """A reminder whose time has come."""
        if self._timers and self._timers[0][0] <= self.now:
            _, _, kind, subject, epoch = heapq.heappop(self._timers)
            return kind, subject, epoch
        return None
