"""What the audit finds, and how it names it.

A finding is *lost* (an id without its end), *duplicated* (two where one may be) or *unexplained* (two
journals disagree).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from common.audit_books import Books, LeaseKey, TurnKey

LOST, DUPLICATED, UNEXPLAINED = "lost", "duplicated", "unexplained"


@dataclass(frozen=True, slots=True)
class Finding:
    """One id that breaks a law."""

    kind: str
    id: str
    what: str


Id = TypeVar("Id", int, LeaseKey)
Law = Callable[[Books], Iterator[Finding]]


def lost(where: str, what: str) -> Finding:
    """An id without its end."""
    return Finding(LOST, where, what)


def twice(where: str, what: str) -> Finding:
    """An id with more ends (or beginnings) than one."""
    return Finding(DUPLICATED, where, what)


def odd(where: str, what: str) -> Finding:
    """An id of which two journals disagree."""
    return Finding(UNEXPLAINED, where, what)


def lease_name(lease: LeaseKey) -> str:
    return f"tree={lease[0]}/lease={lease[1]}.{lease[2]}"


def turn_name(turn: TurnKey) -> str:
    return f"{lease_name(turn[:3])}/turn={turn[3]}"


def tree_name(tree: int) -> str:
    return f"tree={tree}"


def not_in_flight(unended: set[Id], in_flight: set[Id] | int) -> set[Id]:
    """Of the ids without an end, those that are not in flight either. A bare count can only agree or not."""
    if isinstance(in_flight, int):
        return set() if len(unended) == in_flight else unended
    return unended - in_flight
