"""The replay of a journal: the same inputs at the same times must lead the core to the same decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from allocator.core import AllocatorCore
from common.journal import Record
from common.messages import ToAllocator


def replay(core: AllocatorCore, records: Iterable[Record]) -> list[str]:
    """Feed a fresh core with the inputs and ticks of a journal; compare its records with those that follow.

    Returns one sentence for each difference, empty when the core decided as it did back then.
    """
    expected: deque[tuple[str, object]] = deque()
    differences: list[str] = []
    for record in records:
        match record.kind:
            case "input":
                differences += _left_over(expected)
                message = msgspec.convert(record.fields["message"], ToAllocator, builtin_types=(bytes,))
                core.handle(record.fields["peer"], message, record.fields["now"])
            case "tick":
                differences += _left_over(expected)
                core.tick(record.fields["now"])
            case "stopped":
                differences += _left_over(expected)
                core.stop(record.fields["code"], record.fields["reason"], record.fields["now"])
            case "start" | "usage" | "end":
                continue
            case _:
                differences += _compare(expected, record)
        expected.extend(_decisions(core))
    return differences + _left_over(expected)


def _decisions(core: AllocatorCore) -> list[tuple[str, object]]:
    return [(kind, values) for kind, values in core.take_records() if kind not in ("tick", "stopped")]


def _compare(expected: deque[tuple[str, object]], record: Record) -> list[str]:
    if not expected:
        return [f"at byte {record.offset} the journal has {record.kind} {record.fields}, the replay nothing"]
    kind, values = expected.popleft()
    if (kind, msgspec.to_builtins(values, builtin_types=(bytes,))) == (record.kind, record.fields):
        return []
    return [
        f"at byte {record.offset} the journal has {record.kind} {record.fields}, the replay {kind} {values}"
    ]


def _left_over(expected: deque[tuple[str, object]]) -> list[str]:
    found = [f"the replay has {kind} {values}, the journal nothing" for kind, values in expected]
    expected.clear()
    return found
