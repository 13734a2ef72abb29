"""A core that is journalled, snapshotted and killed as the real process is, in a simulation."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Handled, Send
from allocator.recovery import Recovery, recover
from allocator.replay import INPUTS
from allocator.rules import make_rule
from allocator.settings import Settings
from allocator.snapshots import Snapshots, newest_first
from allocator.tree import Branch
from common.config_allocator import BudgetConfig, RandomRuleConfig, RuleConfig
from common.journal import JournalWriter, Record, read_journal
from common.messages import Hello, Message
from common.rundir import RunDir
from tests.allocator.harness import Rig, small


class Mortal:
    """Stands where an `AllocatorCore` would; `kill` makes another process go on from what is on disk.

    A peer that has not said hello to the newest process is a stranger: it is not heard, and `on_stranger` is told.
    """

    def __init__(self, fresh: Callable[[], AllocatorCore], folder: Path, seed: int = 0) -> None:
        self.fresh = fresh
        self.rundir = RunDir.create(folder, "run")
        self.rng = random.Random(seed)
        self.on_stranger: Callable[[str], None] = lambda key: None
        self.kills = 0
        self.snapshot_every = 0
        """Inputs between two snapshots; 0 = none."""
        self.recoveries: list[Recovery] = []
        self._records: list[tuple[str, dict[str, Any]]] = []
        self._start(0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    # --- the process -------------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        recovery = recover(self.fresh, self.rundir)
        self.recoveries.append(recovery)
        self.core = recovery.core
        self.journal = JournalWriter(self.rundir.allocator_journal, recovery.sound_to)
        recovery.begin(self.journal, max(now, recovery.now), run="run")
        self.snapshots = Snapshots(
            self.rundir.allocator_snapshots, recovery.boot, recovery.inputs, recovery.replayed
        )
        self.known: set[str] = set()
        assert self.core.audit() == [], "the books hold the law right after the recovery"

    def kill(self, now: float | None = None, keep: int | None = None) -> None:
        """The process dies, at once unless told when; of the journal it leaves `keep` bytes."""
        now = self.core.state.now if now is None else now
        self.kills += 1
        os.close(self.journal._fd)
        self.journal._fd = -1
        if keep is not None:
            os.truncate(self.rundir.allocator_journal, keep)
        self._start(now)

    def killed_within(
        self, act: Callable[[], Any], now: float, peer: str = "", message: Message | None = None
    ) -> None:
        """It dies while it writes down what an input led to: a part of that is on disk, nothing left it."""
        sound = self.journal.end
        if message is not None:
            self.journal.append("input", peer=peer, now=now, message=message)
        act()
        for kind, values in self.core.take_records():
            self.journal.append(kind, **values)
        self.journal.flush(sync=False)
        self.kill(now, self.rng.randint(sound, self.journal.end))

    # --- what a core does --------------------------------------------------------------------------------

    def handle(self, peer: str, message: Message, now: float) -> Handled:
        if not self._is_known(peer, message):
            return Handled([], False)
        self.journal.append("input", peer=peer, now=now, message=message)
        self.snapshots.count_input()
        handled = self.core.handle(peer, message, now)
        self._drain(now)
        return handled

    def tick(self, now: float) -> list[Send]:
        sends = self.core.tick(now)
        self._drain(now)
        return sends

    def take_records(self) -> list[tuple[str, dict[str, Any]]]:
        records, self._records = self._records, []
        return records

    def _is_known(self, peer: str, message: Message) -> bool:
        if isinstance(message, Hello):
            self.known.add(peer)
        elif peer not in self.known:
            self.on_stranger(peer)
        return peer in self.known

    def _drain(self, now: float) -> None:
        for kind, values in self.core.take_records():
            self.journal.append(kind, **values)
            self._records.append((kind, values))
            if kind in INPUTS:
                self.snapshots.count_input()
        self.core.take_departed()
        self.journal.flush(sync=False)
        if self.snapshot_every and self.snapshots.tail >= self.snapshot_every:
            self.snapshots.take(self.core, self.journal.end, now)
            self.snapshots.close()

    # --- what it leaves ----------------------------------------------------------------------------------

    def records(self, kind: str = "") -> list[Record]:
        """Of the whole journal, all or those of a kind."""
        found = read_journal(self.rundir.allocator_journal)
        return [record for record in found if kind in ("", record.kind)]

    def branches(self) -> list[Branch]:
        """Of all open trees."""
        return [b for tree in self.core.state.forest.trees.values() for b in tree.branches.values()]

    def end(self) -> None:
        """Close the journal, as a process does whose run has ended."""
        self.journal.append("end", in_flight_trees=[], in_flight_leases=[])
        self.journal.flush(sync=False)

    def snapshot(self) -> Path:
        """Take one, whether it is due or not."""
        self.snapshots.take(self.core, self.journal.end, 0.0)
        self.snapshots.close()
        return next(newest_first(self.rundir.allocator_snapshots))


# --- moved by hand -------------------------------------------------------------------------------------------


def maker(
    settings: Settings, rule: RuleConfig | None = None, continuations: int = 2
) -> Callable[[], AllocatorCore]:
    """Makes cores that nothing has happened to."""
    budget = BudgetConfig(continuations=continuations)
    return lambda: AllocatorCore(settings, make_rule(rule or RuleConfig()), make_budget(budget))


def rig_of(mortal: Mortal) -> Rig:
    """One that goes on where its core is."""
    rig = Rig()
    rig.core, rig.check_law = mortal, False  # type: ignore[assignment]
    rig.now = max(rig.now, mortal.core.state.now)
    return rig


def worked(folder: Path) -> Mortal:
    """A little of a run: two actors at work on the first trees, one of them delivered."""
    mortal = Mortal(maker(small(steps=3), RandomRuleConfig(chains=2, expansions=1), continuations=4), folder)
    rig = rig_of(mortal)
    rig.learner(credit=1)
    rig.actor("a/1", slots=3)
    rig.actor("b/1", slots=2)
    rig.work("a/1")
    rig.inspect("b/1")
    for lease in rig.leases("b/1"):
        rig.start("b/1", lease)
        rig.expand("b/1", lease, 0)
    rig.tick(0.2)
    return mortal
