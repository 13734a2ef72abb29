"""The replay of a journal: the same inputs at the same times must lead the core to the same decisions.

    journal ─▶ feed ─┬─ input, tick, stopped, recovered ─▶ core ─▶ its records are expected next
                     └─ anything else ───────────────────▶ compared with what is expected

A journal may end, or be taken up again by another start, in the middle of what an input led to: what the core
decided beyond that is no difference (`outstanding`; whoever takes the journal up writes it down first).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import msgspec

from allocator.core import AllocatorCore
from common.errors import StorageError
from common.journal import Record
from common.messages import ToAllocator

KEPT = 100
"""Differences told in words: behind the first few, everything differs."""
SHOWN = 120
"""Characters of a value that are told."""
INPUTS = ("input", "tick", "stopped")
"""What the core was told, as it records it itself; a journal has `recovered` too. All else came of it."""
NAMES = ("tree", "number", "epoch", "offset")
"""What a record is about."""


class Replay:
    """Feeds a fresh core with the inputs of a journal and compares its records with those that follow."""

    def __init__(self, core: AllocatorCore) -> None:
        self.core = core
        self.inputs = 0
        """Messages, ticks and stops."""
        self.decisions = 0
        """Records of the journal that were compared."""
        self.differing = 0
        self.differences: list[str] = []
        """One sentence each, the first `KEPT`."""
        self.unwritten = 0
        """What the core decided after the journal broke off."""
        self._expected: deque[tuple[str, Any]] = deque()
        self._closed = False

    def feed(self, record: Record) -> None:
        """The next record.

        Raises:
            StorageError: it is none that this release can read.
        """
        self._closed = record.kind == "end"
        act = self._input(record)
        if act is not None:
            self._left_over()
            self.inputs += 1
            act()
            self._expected.extend(r for r in self.core.take_records() if r[0] not in INPUTS)
        elif record.kind == "start":
            self._break_off()
            self._adopt(record)
        elif record.kind == "end":
            self._left_over()
        elif record.kind != "usage":
            self._compare(record)

    def outstanding(self) -> list[tuple[str, Any]]:
        """What the core decided last that the journal does not have yet: records as the core gave them."""
        return list(self._expected)

    def finish(self) -> list[str]:
        """The journal is over; returns the differences."""
        if not self._closed:
            self._break_off()
        self._left_over()
        return self.differences

    def _adopt(self, record: Record) -> None:
        """Each process goes by settings of its own, as far as they may change. A release that wrote none
        down could not change any; nor did every release write whether the run had fallen back."""
        fell_back = bool(record.fields.get("fell_back", False))
        try:
            self.core.adopt(record.fields.get("settings") or {}, fell_back=fell_back)
        except ValueError as error:
            raise StorageError(f"the start at byte {record.offset} has odd settings: {error}") from error

    def _input(self, record: Record) -> Callable[[], object] | None:
        """What the core was told, ready to be told again; None for a record that tells it nothing."""
        core, fields = self.core, record.fields
        try:
            match record.kind:
                case "input":
                    message = msgspec.convert(fields["message"], ToAllocator, builtin_types=(bytes,))
                    return partial(core.handle, fields["peer"], message, fields["now"])
                case "tick":
                    return partial(core.tick, fields["now"])
                case "stopped":
                    return partial(core.stop, fields["code"], fields["reason"], fields["now"])
                case "recovered":
                    return partial(core.restart, fields["boot"], fields["now"])
        except (KeyError, TypeError, msgspec.ValidationError) as error:
            raise StorageError(
                f"the journal has at byte {record.offset} a record {record.kind!r} that this release cannot "
                f"replay ({error}): use the release that wrote it"
            ) from error
        return None

    def _break_off(self) -> None:
        self.unwritten += len(self._expected)
        self._expected.clear()

    def _left_over(self) -> None:
        for kind, values in self._expected:
            self._differ(f"the replay has {shown(kind, values)}, the journal nothing")
        self._expected.clear()

    def _compare(self, record: Record) -> None:
        self.decisions += 1
        was, now = record.fields, None
        if self._expected:
            kind, values = self._expected.popleft()
            now = msgspec.to_builtins(values, builtin_types=(bytes,))
            if kind == record.kind and now != was:
                self._differ(f"at byte {record.offset}, {changes(kind, was, now)}")
            elif kind != record.kind:
                found = shown(kind, now)
                self._differ(f"at byte {record.offset} the journal has {_of(record)}, the replay {found}")
        else:
            self._differ(f"at byte {record.offset} the journal has {_of(record)}, the replay nothing")

    def _differ(self, sentence: str) -> None:
        self.differing += 1
        if len(self.differences) < KEPT:
            self.differences.append(sentence)


def replay(core: AllocatorCore, records: Iterable[Record]) -> list[str]:
    """Feed a fresh core with a whole journal; one sentence for each of the first differences.

    Raises:
        StorageError: a record cannot be read.
    """
    run = Replay(core)
    for record in records:
        run.feed(record)
    return run.finish()


def _of(record: Record) -> str:
    return shown(record.kind, record.fields)


def shown(kind: str, fields: dict[str, Any]) -> str:
    """A record on one line: `lease_issued tree=5 number=3 epoch=0 peer='a/1'`."""
    return " ".join([kind, *(f"{name}={_cut(value)}" for name, value in fields.items())])


def changes(kind: str, was: dict[str, Any], now: dict[str, Any]) -> str:
    """Which fields of two records of one kind differ."""
    same = {name: was[name] for name in NAMES if name in was and was[name] == now.get(name)}
    found = [
        f"{where} was {_cut(before)}, is {_cut(after)} in the replay"
        for name in dict.fromkeys([*was, *now])
        for where, before, after in _apart(name, was.get(name), now.get(name))
    ]
    return f"{shown(kind, same)}: {'; '.join(found)}"


def _apart(name: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """(where, before, after) of two values where they differ: of lists, the items that do."""
    if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (before, after) in enumerate(zip(was, now, strict=True)):
            yield from _apart(f"{name}[{index}]", before, after)
    elif was != now:
        yield name, was, now


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
