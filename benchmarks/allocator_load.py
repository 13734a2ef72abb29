"""A load for the allocator's core: as many actors and open anchors as wanted, and nothing but the core timed.

    make a burst of messages ─▶ timed: core.handle × burst ─▶ grants to actors, trees to the learner ─▶ …

A simulated fleet has a clock and a heap of its own, which cost as much as the core. Here actors take turns:
each lease says its next word when its turn comes (`Starting`, a turn each, `Finished`), in the order granted.
Messages are made outside the timed stretch. Every tree gets `TURNS` turns per continuation, the last ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Send, Settings
from allocator.rules import make_rule
from allocator.state import Record
from common.config_allocator import BudgetConfig, RuleConfig
from common.journal import JournalWriter
from common.messages import (
    PROTOCOL_VERSION,
    Bye,
    Capabilities,
    Committed,
    Consumed,
    Credit,
    Expanded,
    Finished,
    Grant,
    Hello,
    Inspect,
    Inspected,
    Message,
    Starting,
    TreeReady,
)
from common.nouns import Ending, Lease, Outcome, RewardSource, Turn, TurnStatus, Version, VersionRun
from common.predictor import Predictor
from common.seeds import turn_seed

TURNS = 3
"""Of a continuation: two of them are anchors."""
BURST = 256
"""Messages between two looks at the clock."""
FLUSH_S = 0.05
"""`allocator.journal_flush_ms`."""
LEARNER = "learner/0"
NOW = Version(0, 0)
PROMPT = Turn(observation=b"\1\0\0\0\2\0\0\0", state_hash="root")


class Journal:
    """Writes as the allocator's loop does: each input before what it led to, after each burst to the file,
    and to the disk every `FLUSH_S`."""

    def __init__(self, writer: JournalWriter) -> None:
        self.writer = writer
        self.sync_s = 0.0
        """Seconds by the clock in writes that wait for the disk."""
        self._synced = time.monotonic()

    def take(self, key: str, message: Message, now: float, records: list[Record]) -> None:
        self.writer.append("input", peer=key, now=now, message=message)
        for kind, fields in records:
            self.writer.append(kind, **fields)

    def burst(self) -> None:
        began = time.monotonic()
        due = began - self._synced >= FLUSH_S
        self.writer.flush(sync=due)
        if due:
            self._synced = time.monotonic()
            self.sync_s += self._synced - began


class Load:
    """A core with `trees` trees open at once, and peers that answer at once.

    Args:
        continuations: of a tree; each adds `TURNS` − 1 anchors.
        journal: what is written of each input; counts as the core's time.
    """

    def __init__(
        self,
        rule: RuleConfig,
        *,
        trees: int,
        continuations: int,
        staleness: int = 0,
        predictor: Predictor | None = None,
        journal: Journal | None = None,
    ) -> None:
        settings = Settings(
            steps=1 << 40, batch_trees=1, max_policy_lag=trees - 1, max_score_staleness=staleness,
            lease_deadline_s=1e6, dead_after_s=1e6,
        )  # fmt: skip
        self.core = AllocatorCore(
            settings, make_rule(rule), make_budget(BudgetConfig(continuations=continuations)), predictor
        )
        self.journal = journal
        self.now = 0.0
        self.cpu_s = 0.0
        """CPU seconds in the core, and in the journal."""
        self.wall_s = 0.0
        """The same by the clock: waits for the disk are in it, and whatever else the machine does."""
        self.messages = 0
        self.grants = 0
        self.closed = 0
        self._actors: list[str] = []
        self._hired = 0
        self._running: deque[tuple[str, Lease, int]] = deque()
        self._words: deque[tuple[str, Message]] = deque()
        self._steps = 0
        hello = Hello("learner", "learner", "0", PROTOCOL_VERSION, Capabilities(), {}, "w", version=NOW)
        self._words += [(LEARNER, hello), (LEARNER, Credit(1 << 30))]

    # --- actors ------------------------------------------------------------------------------------------

    def hire(self, actors: int, slots: int) -> None:
        """That many more actors say hello."""
        can = Capabilities(slots=slots, process_scores=True)
        for number in range(self._hired, self._hired + actors):
            self._actors.append(f"a{number}/0")
            self._words.append((f"a{number}/0", Hello("actor", f"a{number}", "0", PROTOCOL_VERSION, can, {})))

        self._hired += actors

    def dismiss(self, actors: int) -> None:
        """The newest ones leave, with what they hold: it goes on elsewhere."""
        gone = set(self._actors[len(self._actors) - actors :])
        self._actors = self._actors[: len(self._actors) - actors]
        self._running = deque(each for each in self._running if each[0] not in gone)
        self._words += [(key, Bye(0, "done")) for key in sorted(gone)]

    # --- going on ----------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Go on until `until`, asked between bursts.

        Raises:
            RuntimeError: nothing is left to say: the core waits for what cannot come.
        """
        while not until():
            burst = self._burst()
            if not burst:
                raise RuntimeError(f"the core waits for {self.core.waiting()} and nobody has anything to say")
            for sends in self._timed(burst):
                for send in sends:
                    self._deliver(send)

    def run_for(self, grants: int) -> None:
        """Go on for that many grants."""
        goal = self.grants + grants
        self.run(lambda: self.grants >= goal)

    def _burst(self) -> list[tuple[str, Message]]:
        words = [self._words.popleft() for _ in range(min(BURST, len(self._words)))]
        for key, lease, said in list(islice(self._running, BURST - len(words))):
            self._running.popleft()
            words.append((key, word(lease, said)))
            if said < TURNS + 1:
                self._running.append((key, lease, said + 1))
        return words

    def _timed(self, burst: list[tuple[str, Message]]) -> list[list[Send]]:
        core, journal, out = self.core, self.journal, []
        cpu, wall = time.process_time(), time.perf_counter()
        for key, message in burst:
            self.now += 1e-5
            out.append(core.handle(key, message, self.now).sends)
            records = core.take_records()
            if journal is not None:
                journal.take(key, message, self.now, records)
        if journal is not None:
            journal.burst()
        self.cpu_s += time.process_time() - cpu
        self.wall_s += time.perf_counter() - wall
        self.messages += len(burst)
        return out

    def _deliver(self, send: Send) -> None:
        match send.message:
            case Grant(leases=leases):
                self.grants += len(leases)
                self._running += [(send.peer, lease, 0) for lease in leases]
            case Inspect(tree=tree, task=task):
                self._words.append((send.peer, Inspected(tree, task, PROMPT)))
            case TreeReady(tree=tree):
                self.closed += 1
                self._steps += 1
                at = Version(0, self._steps)
                self._words += [(LEARNER, Consumed([tree.id], at)), (LEARNER, Committed(at, [tree.id]))]

    @property
    def anchors(self) -> int:
        """Open anchors of all open trees."""
        trees = self.core.state.forest.trees.values()
        return sum(n.turn.status is TurnStatus.OPEN for tree in trees for n in tree.nodes.values())

    def totals(self) -> dict[str, float]:
        """Totals so far, to be subtracted."""
        return {
            "cpu_s": self.cpu_s,
            "wall_s": self.wall_s,
            "sync_s": self.journal.sync_s if self.journal is not None else 0.0,
            "messages": self.messages,
            "grants": self.grants,
            "closed": self.closed,
        }


def word(lease: Lease, said: int) -> Message:
    """What an actor says next of a lease, after `said` words."""
    if said == 0:
        return Starting(lease.id, NOW)
    if said <= TURNS:
        return Expanded(lease.id, said - 1, turn(lease, said - 1))
    reward = float(lease.seed >> 20 & 1)
    return Finished(lease.id, TURNS, Outcome(reward, reward, RewardSource.ENVIRONMENT, Ending.TERMINATED))


def turn(lease: Lease, offset: int) -> Turn:
    """One token, so that what is measured are the core's books."""
    seed, last = turn_seed(lease.seed, offset), offset + 1 == TURNS
    return Turn(
        action=(seed & 0xFFFF).to_bytes(4, "little"),
        logprobs=b"\0\0\0\0",
        entropies=(seed >> 16 & 0x3EFF).to_bytes(4, "little"),
        versions=[VersionRun(NOW, 1)],
        observation=b"\3\0\0\0",
        seed=seed,
        reward=float(lease.seed >> 20 & 1) if last else 0.0,
        status=TurnStatus.TERMINATED if last else TurnStatus.OPEN,
        state_hash="s",
    )
