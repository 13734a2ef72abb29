"""From the journals of a run to totals over a stretch of it.

    usage records ─▶ Account.between(window, …)         seconds, CPU seconds, bytes
    turns and failures, consumed batches ─▶ Tokens      what was sampled and trained

The stretch is the steady one: from the end of the first update to the end of the last. What is before it
(imports, the first weights, filling the pipeline) and after it (drain) is left out and its length reported.
Totals are written about twice a second by actors, every two seconds by the allocator and after each update by
the learner; in between they are interpolated.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import BenchmarkFailed
from common.journal import Record, read_journal
from common.rundir import RunDir

Fields = Mapping[str, Any]
Id = tuple[int, ...]
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to `end`, monotonic seconds."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def holds(self, now: float) -> bool:
        return self.start < now <= self.end


@dataclass(frozen=True, slots=True)
class Account:
    """The `usage` records of one process, in order."""

    name: str
    records: tuple[Fields, ...]

    def between(self, window: Window, total: Callable[[Fields], float]) -> float:
        """How much a total grew in the window."""
        return self._at(window.end, total) - self._at(window.start, total)

    def _at(self, now: float, total: Callable[[Fields], float]) -> float:
        """The total at `now`, on the straight line between the records around it."""
        times = [float(record["now"]) for record in self.records]
        after = min(max(1, bisect_left(times, now)), len(times) - 1)
        left, right = self.records[after - 1], self.records[after]
        span = times[after] - times[after - 1]
        share = min(1.0, max(0.0, (now - times[after - 1]) / span)) if span > 0 else 1.0
        return total(left) + share * (total(right) - total(left))

    def seconds(self, window: Window, state: str, book: str = "seconds") -> float:
        """Seconds spent on a state."""
        return self.between(window, lambda fields: float(fields[book].get(state, 0.0)))

    def states(self, book: str = "seconds") -> list[str]:
        """Every state of the process."""
        return sorted(self.records[-1][book])

    def cpu_seconds(self, window: Window) -> float:
        return self.between(window, lambda fields: float(fields["cpu_s"]))

    def sent(self, window: Window, endpoint: str) -> float:
        """Bytes sent on an endpoint."""
        return self.between(window, lambda fields: float(fields["traffic"].get(endpoint, (0, 0))[0]))

    def received(self, window: Window, endpoint: str) -> float:
        """Bytes received on an endpoint."""
        return self.between(window, lambda fields: float(fields["traffic"].get(endpoint, (0, 0))[1]))


def account(name: str, records: Iterable[Record]) -> Account:
    """The account of a process from its journal.

    Raises:
        BenchmarkFailed: the process was restarted, or ended before it had written two records.
    """
    found, starts = list[Fields](), 0
    for record in records:
        starts += record.kind == "start"
        if record.kind == "usage":
            found.append(record.fields)
    if starts > 1:
        raise BenchmarkFailed(f"{name} was restarted {starts - 1} times: its times and bytes say nothing")
    if len(found) < 2:
        raise BenchmarkFailed(f"{name} has written {len(found)} usage records, two are needed: train longer")
    return Account(name, tuple(found))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Action tokens in the window."""

    accepted: int
    """Of the turns that the allocator took."""
    crossed: int
    """Of turns that were reported when their lease had been revoked or had ended otherwise."""
    discarded: int
    """Sampled in leases that were stopped, and never reported as a turn."""
    trained: int
    """With a gradient."""
    context: int
    """In trained trees, without a gradient: too old, or without credit."""
    turns: int
    """Accepted."""
    episodes: int
    """Leases that finished."""

    @property
    def sampled(self) -> int:
        """All of them, revoked work included: what any comparison of cost counts."""
        return self.accepted + self.crossed + self.discarded


@dataclass(frozen=True, slots=True)
class Accounts:
    """Everything that is read of a run."""

    window: Window
    updates: int
    """In the window."""
    ramp_up_s: float
    """From the first lease to the window."""
    tokens: Tokens
    actors: tuple[Account, ...]
    allocator: Account
    learner: Account
    endpoints: Mapping[str, str]
    """Role -> endpoint."""


def read_accounts(path: Path) -> Accounts:
    """Read the journals of a finished run.

    Raises:
        StorageError: a journal is missing or damaged.
        BenchmarkFailed: the run is too short, or a process was restarted.
    """
    rundir = RunDir.open(path)
    learner, updates = list(read_journal(rundir.learner_journal)), 0
    book = account("the learner", learner)
    window = Window(float(book.records[0]["now"]), float(book.records[-1]["now"]))
    updates = int(book.records[-1]["step"]) - int(book.records[0]["step"])
    allocator = list(read_journal(rundir.allocator_journal))
    actors = sorted((path / "actors").glob("*/journal.tw"))
    return Accounts(
        window=window,
        updates=updates,
        ramp_up_s=window.start - first_lease(allocator),
        tokens=count_tokens(allocator, learner, window, int(book.records[0]["step"])),
        actors=tuple(account(file.parent.name, read_journal(file)) for file in actors),
        allocator=account("the allocator", allocator),
        learner=book,
        endpoints=read_endpoints(path),
    )


def read_endpoints(path: Path) -> dict[str, str]:
    """Role -> endpoint, as the run's processes have published them."""
    files = (path / "endpoints").glob("*.json")
    return {file.stem: str(json.loads(file.read_text(encoding="utf-8"))["endpoint"]) for file in files}


def timed(records: Iterable[Record]) -> Iterable[tuple[float, Record]]:
    """The allocator's records, each with the time of the input or tick that led to it."""
    now = 0.0
    for record in records:
        if record.kind in ("input", "tick"):
            now = float(record.fields["now"])
        yield now, record


def first_lease(allocator: Iterable[Record]) -> float:
    """When the first lease was issued. Raises `BenchmarkFailed` where none was."""
    for now, record in timed(allocator):
        if record.kind == "lease_issued":
            return now
    raise BenchmarkFailed("the allocator has issued no lease")


def count_tokens(
    allocator: Sequence[Record], learner: Sequence[Record], window: Window, first_step: int
) -> Tokens:
    """Tokens that the allocator heard of in the window, and of the batches trained in it (those after
    `first_step`)."""
    inside = [record for now, record in timed(allocator) if window.holds(now)]
    taken = {_turn(record.fields) for record in allocator if record.kind == "turn_accepted"}
    crossed, discarded = tokens_not_accepted(inside, taken)
    turns = [int(record.fields["tokens"]) for record in inside if record.kind == "turn_accepted"]
    ends = [record.fields["kind"] for record in inside if record.kind == "lease_ended"]
    batches = [record.fields for record in learner if record.kind == "consumed"]
    batches = [batch for batch in batches if batch["step"] > first_step]
    return Tokens(
        accepted=sum(turns),
        crossed=crossed,
        discarded=discarded,
        trained=sum(int(batch["tokens_trained"]) for batch in batches),
        context=sum(int(batch["tokens_context"]) for batch in batches),
        turns=len(turns),
        episodes=ends.count("finished"),
    )


def tokens_not_accepted(allocator: Iterable[Record], taken: Set[Id]) -> tuple[int, int]:
    """Tokens of turns that came and are not in `taken`, and tokens that actors said they threw away.

    A message that came again counts once: turns are known by lease and offset, failures by lease.
    """
    crossed: dict[Id, int] = {}
    discarded: dict[Id, int] = {}
    for record in allocator:
        message = record.fields["message"] if record.kind == "input" else {}
        if message.get("type") == "Expanded":
            turn = _turn({**message["lease"], "offset": message["offset"]})
            if turn not in taken:
                crossed[turn] = len(message["turn"].get("action", b"")) // TOKEN_BYTES
        elif message.get("type") == "Failed":
            discarded[_lease(message["lease"])] = message.get("discarded_tokens", 0)
    return sum(crossed.values()), sum(discarded.values())


def _lease(fields: Fields) -> Id:
    return fields["tree"], fields["number"], fields["epoch"]


def _turn(fields: Fields) -> Id:
    return (*_lease(fields), fields["offset"])
