"""The conservation laws of a run, each a small function from the journals to what breaks it.

    issued lease ──▶ exactly one end                     opened tree ──▶ ready | dropped | in flight
    finished at the allocator ⇔ finished at an actor     ready ⊇ delivered ⊆ received
    accepted turn ──▶ sampled by an actor, same tokens   received ──▶ trained once | dropped | queued
    granted at an actor ──▶ exactly one end              trained ⇔ consumed, committed

A finding is *lost* (an id without its end), *duplicated* (two where one may be) or *unexplained* (two
journals disagree). A process that was killed leaves no `end` record; what it held then counts as in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from common.audit_books import Books, LeaseKey, TurnKey

LOST, DUPLICATED, UNEXPLAINED = "lost", "duplicated", "unexplained"
DELIVERED = ("finished", "horizon")
"""Ends that brought a result."""


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


def _missing(unended: set[Id], in_flight: set[Id] | int) -> set[Id]:
    """Of the ids without an end, those that are not in flight either. A bare count can only agree or not."""
    if isinstance(in_flight, int):
        return set() if len(unended) == in_flight else unended
    return unended - in_flight


# ------------------------------------------------------------------------------------------------ leases


def each_issued_lease_ends_once(books: Books) -> Iterator[Finding]:
    book = books.allocator
    for lease, times in book.issued.items():
        if times > 1:
            yield twice(lease_name(lease), f"issued {times} times")
    for lease, ends in book.ended.items():
        kinds = ", ".join(end.kind for end in ends)
        if lease not in book.issued:
            yield odd(lease_name(lease), f"ended ({kinds}) but never issued")
        elif len(ends) > 1:
            yield twice(lease_name(lease), f"ended {len(ends)} times: {kinds}")
    yield from _leases_without_an_end(books)


def _leases_without_an_end(books: Books) -> Iterator[Finding]:
    book = books.allocator
    unended = {lease for lease in book.issued if lease not in book.ended}
    for lease in sorted(_missing(unended, book.leases_in_flight) if book.closed else ()):
        yield lost(lease_name(lease), "issued, never ended and not in flight at the end")


def accepted_results_are_in_an_actors_journal(books: Books) -> Iterator[Finding]:
    elsewhere = _without_a_journal(books)
    for lease, ends in books.allocator.ended.items():
        end = ends[0]
        if end.kind not in DELIVERED or books.allocator.holders.get(lease, "") in elsewhere:
            continue
        said = [e for actor in books.actors for e in actor.ended.get(lease, ()) if e.kind in DELIVERED]
        if not said:
            yield odd(lease_name(lease), f"{end.kind} at the allocator, in no actor's journal")
        elif all((e.kind, e.turns) != (end.kind, end.turns) for e in said):
            there, here = f"{said[0].kind} after {said[0].turns}", f"{end.kind} after {end.turns} turns"
            yield odd(lease_name(lease), f"{here} at the allocator, {there} at the actor")


def every_actor_has_a_journal(books: Books) -> Iterator[Finding]:
    for peer in sorted(_without_a_journal(books)):
        yield odd(
            f"actor={peer}", "held leases and has no journal here: name its directory in audit.actor_dirs"
        )


def _without_a_journal(books: Books) -> set[str]:
    """Peers whose work cannot be compared."""
    known = {peer for actor in books.actors for peer in actor.peers}
    holders = set(books.allocator.holders.values())
    return {peer for peer in holders if peer not in known and peer.partition("/")[0] not in known}


def actors_results_are_accepted_or_explained(books: Books) -> Iterator[Finding]:
    """An actor's result that was not taken needs the allocator's word why: revoked, expired, fenced, …"""
    book = books.allocator
    for actor in books.actors:
        for lease, said in actor.ended.items():
            if said[0].kind not in DELIVERED:
                continue
            ends = book.ended.get(lease, [])
            if lease not in book.issued:
                yield odd(lease_name(lease), f"{said[0].kind} at {actor.name}, never issued")
            elif ends and ends[0].kind == "declined":
                yield odd(lease_name(lease), f"{said[0].kind} at {actor.name}, declined at the allocator")


def each_granted_lease_ends_once_at_its_actor(books: Books) -> Iterator[Finding]:
    holders: dict[LeaseKey, int] = {}
    for actor in books.actors:
        for lease in actor.granted:
            holders[lease] = holders.get(lease, 0) + 1
            ends = actor.ended.get(lease, [])
            if not ends and lease not in actor.cut_off:
                yield lost(lease_name(lease), f"granted to {actor.name}, which never ended it")
            elif len(ends) > 1:
                yield twice(lease_name(lease), f"ended {len(ends)} times at {actor.name}")
            if lease not in books.allocator.issued:
                yield odd(lease_name(lease), f"granted to {actor.name}, never issued")
    for lease, count in holders.items():
        if count > 1:
            yield twice(lease_name(lease), f"granted to {count} actors")


# ------------------------------------------------------------------------------------------ turns, tokens


def accepted_turns_were_sampled(books: Books) -> Iterator[Finding]:
    seen: dict[tuple[int, int, int], int] = {}
    sampled = {turn: tokens for actor in books.actors for turn, tokens in actor.turns.items()}
    elsewhere = _without_a_journal(books)
    for turn, accepted in books.allocator.turns.items():
        place = (turn[0], turn[1], turn[3])
        seen[place] = seen.get(place, 0) + len(accepted)
        if turn not in sampled:
            if books.allocator.holders.get(turn[:3], "") not in elsewhere:
                yield odd(turn_name(turn), "accepted, in no actor's journal")
        elif sampled[turn] != accepted[0]:
            yield odd(turn_name(turn), f"accepted with {accepted[0]} tokens, sampled with {sampled[turn]}")
    for tree, number, _, offset in books.allocator.discarded:
        seen[tree, number, offset] = seen.get((tree, number, offset), 0) - 1
    for (tree, number, offset), count in seen.items():
        if count < 0:
            yield odd(f"tree={tree}/lease={number}/turn={offset}", "discarded, never accepted")
        if count > 1:
            yield twice(f"tree={tree}/lease={number}/turn={offset}", f"accepted {count} times")
    for turn in sorted(sampled.keys() - books.allocator.turns.keys()):
        ends = books.allocator.ended.get(turn[:3], [])
        if ends and ends[0].kind in DELIVERED:
            yield lost(turn_name(turn), f"sampled in a continuation that {ends[0].kind}, never accepted")


def turns_of_a_result_were_accepted(books: Books) -> Iterator[Finding]:
    """A finished continuation has all its turns, whichever attempts brought them."""
    offsets: dict[tuple[int, int], set[int]] = {}
    for tree, number, _, offset in books.allocator.turns:
        offsets.setdefault((tree, number), set()).add(offset)
    for lease, ends in books.allocator.ended.items():
        if ends[0].kind in DELIVERED:
            found = offsets.get(lease[:2], set())
            if found != set(range(ends[0].turns)):
                what = f"{ends[0].kind} after {ends[0].turns} turns, {len(found)} of them accepted"
                yield lost(lease_name(lease), what)


def tokens_of_a_tree_are_those_accepted(books: Books) -> Iterator[Finding]:
    accepted: dict[int, int] = {}
    for turn, tokens in books.allocator.turns.items():
        accepted[turn[0]] = accepted.get(turn[0], 0) + tokens[0]
    for turn, again in books.allocator.discarded.items():
        accepted[turn[0]] = accepted.get(turn[0], 0) - again
    stated = {tree: tokens[0] for tree, tokens in books.allocator.ready.items()}
    stated |= {tree: ends[0][1] for tree, ends in books.allocator.dropped.items() if tree not in stated}
    for tree, count in stated.items():
        if accepted.get(tree, 0) != count:
            yield odd(tree_name(tree), f"{accepted.get(tree, 0)} tokens accepted, {count} in the tree")
    for tree, count in books.learner.received.items():
        sent = books.allocator.ready.get(tree, [count])[0]
        if sent != count:
            yield odd(tree_name(tree), f"sent with {sent} tokens, received with {count}")


# ------------------------------------------------------------------------------------------------- trees


def each_opened_tree_ends_once(books: Books) -> Iterator[Finding]:
    """Committed, dropped with a reason, or in flight. A ready tree may be dropped, by the learner."""
    book = books.allocator
    for tree, times in book.opened.items():
        if times > 1:
            yield twice(tree_name(tree), f"opened {times} times")
    for tree in sorted(set(book.ready) | set(book.dropped) | book.committed):
        if tree not in book.opened:
            yield odd(tree_name(tree), "ready, dropped or committed, never opened")
        if len(book.ready.get(tree, ())) > 1:
            yield twice(tree_name(tree), f"ready {len(book.ready[tree])} times")
        ends = len(book.dropped.get(tree, ())) + (tree in book.committed)
        if ends > 1:
            yield twice(tree_name(tree), f"dropped or committed {ends} times")
        given_up = tree in books.learner.dropped or tree in books.learner.abandoned
        if tree in book.ready and tree in book.dropped and not given_up:
            yield twice(tree_name(tree), "ready and dropped, and the learner did not drop it")
    if book.closed:
        unended = set(book.opened) - set(book.dropped) - book.committed
        for tree in sorted(_missing(unended, book.trees_in_flight)):
            yield lost(tree_name(tree), "opened, not committed, dropped or in flight at the end")


def delivered_trees_are_ready_and_received(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    for tree in sorted(book.delivered - set(book.ready)):
        yield odd(tree_name(tree), "delivered, never ready")
    for tree in sorted(set(learner.received) - book.delivered):
        yield odd(tree_name(tree), "received by the learner, never delivered")
    if learner.closed and book.closed:
        in_flight = book.trees_in_flight if isinstance(book.trees_in_flight, set) else set()
        for tree in sorted(book.delivered - set(learner.received) - in_flight):
            yield lost(tree_name(tree), "delivered, never received by the learner")


def each_received_tree_is_trained_once_or_dropped(books: Books) -> Iterator[Finding]:
    learner = books.learner
    for tree, times in learner.trained.items():
        if times > 1:
            yield twice(tree_name(tree), f"trained {times} times in the surviving lineage")
        if tree in learner.dropped:
            yield twice(tree_name(tree), f"trained and dropped ({learner.dropped[tree][0]})")
    for tree in sorted((set(learner.trained) | set(learner.dropped)) - set(learner.received)):
        yield odd(tree_name(tree), "trained or dropped, never received")
    if learner.closed:
        unended = set(learner.received) - set(learner.trained) - set(learner.dropped)
        for tree in sorted(_missing(unended, learner.queued)):
            yield lost(tree_name(tree), "received, not trained, dropped or queued at the end")


def both_sides_agree_on_what_was_trained(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    trained = set(learner.trained)
    for tree in sorted(book.consumed - trained - learner.abandoned):
        yield odd(tree_name(tree), "consumed at the allocator, not trained at the learner")
    if book.closed and learner.closed:
        for tree in sorted(trained - book.consumed):
            yield odd(tree_name(tree), "trained, not consumed at the allocator")


def committed_trees_are_in_a_checkpoint(books: Books) -> Iterator[Finding]:
    book, learner = books.allocator, books.learner
    saved = {tree for tree, step in learner.trained_at.items() if step <= learner.committed_step}
    for tree in sorted(book.committed - saved - learner.abandoned):
        yield odd(tree_name(tree), "committed, in no checkpoint of the learner")
    if learner.closed:
        for tree in sorted(set(learner.trained) - saved):
            yield lost(tree_name(tree), "trained, in no checkpoint after an orderly end")
    if learner.closed and book.closed:
        for tree in sorted(saved - book.committed):
            yield odd(tree_name(tree), "in a checkpoint, not committed at the allocator")


LAWS: tuple[Law, ...] = (
    each_issued_lease_ends_once,
    every_actor_has_a_journal,
    accepted_results_are_in_an_actors_journal,
    actors_results_are_accepted_or_explained,
    each_granted_lease_ends_once_at_its_actor,
    accepted_turns_were_sampled,
    turns_of_a_result_were_accepted,
    tokens_of_a_tree_are_those_accepted,
    each_opened_tree_ends_once,
    delivered_trees_are_ready_and_received,
    each_received_tree_is_trained_once_or_dropped,
    both_sides_agree_on_what_was_trained,
    committed_trees_are_in_a_checkpoint,
)
