"""Trees on their way: how many may be opened, and where each finished one is until the learner commits it.

    slot ──open──▶ growing ──▶ READY ──credit──▶ DELIVERED ──Consumed──▶ CONSUMED ──Committed──▶ forgotten
      ▲                │          ▲                  │                       │
      └── dropped ◀────┴──────────┴── a new learner incarnation: redelivered ┘
                                      (a restart of the allocator: what was DELIVERED)

A run has `steps · batch` slots; a tree takes the lowest free one and a drop frees it, so that opened −
dropped never exceeds what the run trains on. The wave of a tree is `slot // batch`.

Where a budget spreads one sum over the prompts of a wave, they come as a pool, possibly larger than the wave:
the first of them takes all slots of the wave, and those chosen share them out. A pool that was begun is
filled before anything else and whatever the learner's step, since nothing of it can grow before it is whole:
half a pool that waited for room behind other trees, and they for an update that lacks its trees, would stand
for ever.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from dataclasses import dataclass

from allocator.settings import Settings
from common.nouns import Tree, Version
from common.staleness import work_ahead


class TreeState(enum.Enum):
    READY = "ready"
    DELIVERED = "delivered"
    CONSUMED = "consumed"


@dataclass(slots=True)
class Parcel:
    """A finished tree that is kept until it is committed or dropped."""

    tree: Tree
    slot: int
    tokens: int
    state: TreeState = TreeState.READY
    step: int = -1
    """Update it went into, once consumed."""
    sent: bool = False
    """Whether it ever left for a learner, and may have arrived."""


class Delivery:
    """Slots, parcels and the learner's credit."""

    def __init__(self, settings: Settings, pool: int = 0) -> None:
        self.settings = settings
        self.pool = pool
        """Prompts of a wave's pool; 0 = each prompt is on its own."""
        self.pools: dict[int, int] = {}
        """Prompts that are still to be opened, by wave, while its pool has not been chosen from."""
        self.parcels: dict[int, Parcel] = {}
        self.states: Counter[TreeState] = Counter()
        self.opened = 0
        self.dropped: Counter[str] = Counter()
        self.committed = 0
        self.committed_at: dict[int, list[tuple[int, int]]] = {}
        """(tree, slot) by the step they went into: a learner may fall back to an older checkpoint."""
        self.credit = 0
        """Trees the learner is ready to hold, counted from its first hello as this incarnation."""
        self.sent = 0
        self._ready: list[int] = []
        self._next_slot = 0
        self._free_slots: list[int] = []

    # --- opening -----------------------------------------------------------------------------------------

    def room(self, step: int, growing: int) -> int:
        """Trees that may be opened now, at the learner's `step` with `growing` open trees that have a slot of
        their own; of a pool that was not begun, how many of its slots."""
        settings = self.settings
        if self.pools:
            missing = sum(self.pools.values())
            if missing:
                return missing
            growing += len(self.pools) * settings.batch_trees
        accepted = len(self.parcels) + self.committed
        ahead = work_ahead(step, settings.max_policy_lag, settings.batch_trees, accepted, growing)
        return ahead if ahead <= 0 else min(ahead, settings.trees - self.taken)

    @property
    def taken(self) -> int:
        """Slots that a tree or a pool has."""
        return self._next_slot - len(self._free_slots)

    def take_slot(self) -> tuple[int, int]:
        """Open a tree: its id (order of opening) and its slot; of a pool, the first of its wave."""
        tree, batch = self.opened, self.settings.batch_trees
        self.opened += 1
        for wave, missing in self.pools.items():
            if missing:
                self.pools[wave] -= 1
                return tree, wave * batch
        if self._free_slots:
            return tree, heapq.heappop(self._free_slots)
        slot = self._next_slot
        self._next_slot += batch if self.pool else 1
        if self.pool:
            self.pools[slot // batch] = self.pool - 1
        return tree, slot

    def in_pool(self, slot: int) -> bool:
        """Whether the wave of a slot has not been chosen from yet."""
        return slot // self.settings.batch_trees in self.pools

    def chosen(self, wave: int) -> None:
        """Its slots have gone to prompts of its pool."""
        del self.pools[wave]

    def drop(self, slot: int, reason: str, *, candidate: bool = False) -> None:
        """A tree is given up: its slot is free for another. A `candidate` has none: where its pool has not
        been chosen from, it lacks a prompt now."""
        self.dropped[reason] += 1
        if not candidate:
            heapq.heappush(self._free_slots, slot)
        elif self.in_pool(slot):
            self.pools[slot // self.settings.batch_trees] += 1

    # --- parcels -----------------------------------------------------------------------------------------

    def finished(self, tree: Tree, slot: int) -> Parcel:
        """A tree is complete: it waits for credit."""
        self.parcels[tree.id] = parcel = Parcel(tree, slot, tree.num_action_tokens())
        self.states[TreeState.READY] += 1
        heapq.heappush(self._ready, tree.id)
        return parcel

    def next_delivery(self) -> Parcel | None:
        """The lowest finished tree within the credit, now counted as delivered."""
        while self._ready and self.sent < self.credit:
            parcel = self.parcels.get(heapq.heappop(self._ready))
            if parcel is not None and parcel.state is TreeState.READY:
                self._move(parcel, TreeState.DELIVERED)
                parcel.sent = True
                self.sent += 1
                return parcel
        return None

    def _move(self, parcel: Parcel, state: TreeState) -> None:
        self.states[parcel.state] -= 1
        self.states[state] += 1
        parcel.state = state

    def consume(self, tree: int, step: int) -> bool:
        """It is in the update that made `step`. False for a tree that is not here (any more) or was
        consumed."""
        parcel = self.parcels.get(tree)
        if parcel is None or parcel.state is TreeState.CONSUMED:
            return False
        self._move(parcel, TreeState.CONSUMED)
        parcel.step = step
        return True

    def commit(self, tree: int, step: int) -> bool:
        """A checkpoint on disk contains it: forget it. False when it was forgotten before."""
        parcel = self.parcels.pop(tree, None)
        if parcel is None:
            return False
        self.states[parcel.state] -= 1
        self.committed += 1
        step = parcel.step if parcel.state is TreeState.CONSUMED else step
        self.committed_at.setdefault(step, []).append((tree, parcel.slot))
        return True

    def discard(self, tree: int, reason: str) -> Parcel | None:
        """The learner will never train it. None when it is not here."""
        parcel = self.parcels.pop(tree, None)
        if parcel is not None:
            self.states[parcel.state] -= 1
            self.drop(parcel.slot, reason)
        return parcel

    # --- restarts ----------------------------------------------------------------------------------------

    def take_back(self) -> None:
        """Whether delivered trees arrived is not known: they go again, within the same credit.

        A learner that has them already takes no notice, and its word about them counts as if they had not.
        """
        for tree, parcel in self.parcels.items():
            if parcel.state is TreeState.DELIVERED:
                self._move(parcel, TreeState.READY)
                self.sent -= 1
                heapq.heappush(self._ready, tree)

    def rejoin(self, version: Version) -> tuple[list[int], list[int]]:
        """A new learner incarnation resumed at `version`; its credit starts at zero.

        What the old one held, or trained in updates beyond that step, is delivered again; what it trained
        up to that step is in the checkpoint. Trees committed in a checkpoint that could not be loaded are
        lost with it. Returns (committed, lost).
        """
        self.credit = self.sent = 0
        in_checkpoint = []
        for tree, parcel in self.parcels.items():
            if parcel.state is TreeState.CONSUMED and parcel.step <= version.step:
                in_checkpoint.append(tree)
            elif parcel.state is not TreeState.READY:
                self._move(parcel, TreeState.READY)
                parcel.step = -1
                heapq.heappush(self._ready, tree)
        for tree in in_checkpoint:
            self.commit(tree, version.step)
        lost = [
            (s, entry) for s, entries in self.committed_at.items() if s > version.step for entry in entries
        ]
        for step, (_, slot) in lost:
            self.committed_at.pop(step, None)
            self.committed -= 1
            self.drop(slot, "checkpoint_lost")
        return in_checkpoint, [tree for _, (tree, _) in lost]
