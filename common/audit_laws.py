"""The conservation laws of a run, each a small function from the journals to what breaks it. Here: leases
and turns; those of trees are in `audit_tree_laws`.

    issued lease ──▶ exactly one end              granted at an actor ──▶ exactly one end
    finished at the allocator ──▶ finished at an actor, as many turns
    finished at an actor ──▶ finished at the allocator, or taken from the actor before it was heard (`TAKEN`)
    accepted turn ──▶ sampled once, same tokens
    sampled tokens = accepted + crossed (reported when the lease had ended) + discarded (never a turn)

An end that follows from the actor's own word (failed, declined, given up because of that) cannot stand
beside a result of the same attempt: the actor has one word for each. A process that was killed leaves no
`end` record; what it held then counts as in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.audit_books import Books, End, LeaseKey, TurnKey
from common.audit_findings import (
    Finding,
    Law,
    lease_name,
    lost,
    not_in_flight,
    odd,
    tree_name,
    turn_name,
    twice,
)
from common.audit_tree_laws import TREE_LAWS

DELIVERED = ("finished", "horizon")
"""Ends that brought a result."""
TAKEN = ("revoked", "expired", "fenced", "run_ended")
"""Ends that the allocator decides alone, while the actor may be at work or its result on the way."""
GIVEN_UP_UNHEARD = ("no progress in time", "peer is silent", "said goodbye", "superseded")
"""Reasons of a drop that are the allocator's alone too: the last attempt expired or was fenced. Every other
drop follows a `Failed`."""


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
    for lease in sorted(not_in_flight(unended, book.leases_in_flight) if book.closed else ()):
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
    """A result that was not taken needs the allocator's word why. Without any, the lease is in flight."""
    book = books.allocator
    for actor in books.actors:
        for lease, said in actor.ended.items():
            if said[0].kind not in DELIVERED:
                continue
            ends = book.ended.get(lease, [])
            if lease not in book.issued:
                yield odd(lease_name(lease), f"{said[0].kind} at {actor.name}, never issued")
            elif ends and ends[0].kind not in DELIVERED and not _taken(ends[0]):
                why = f" ({ends[0].detail})" if ends[0].detail else ""
                what = f"{said[0].kind} at {actor.name}, {ends[0].kind}{why} at the allocator"
                yield odd(lease_name(lease), what)


def _taken(end: End) -> bool:
    """Whether the allocator ended the attempt without a word of its actor."""
    return end.kind in TAKEN or (end.kind == "dropped" and end.detail in GIVEN_UP_UNHEARD)


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
    sampled, elsewhere = _sampled(books), _without_a_journal(books)
    for turn, accepted in books.allocator.turns.items():
        if turn not in sampled:
            if books.allocator.holders.get(turn[:3], "") not in elsewhere:
                yield odd(turn_name(turn), "accepted, in no actor's journal")
        elif sampled[turn][0] != accepted[0]:
            yield odd(turn_name(turn), f"accepted with {accepted[0]} tokens, sampled with {sampled[turn][0]}")
    for turn, times in sampled.items():
        if len(times) > 1:
            yield twice(turn_name(turn), f"reported {len(times)} times in actors' journals")


def _sampled(books: Books) -> dict[TurnKey, list[int]]:
    """Tokens of each turn in the actors' journals, once per record."""
    sampled: dict[TurnKey, list[int]] = {}
    for actor in books.actors:
        for turn, tokens in actor.turns.items():
            sampled.setdefault(turn, []).extend(tokens)
    return sampled


def each_place_holds_one_accepted_turn(books: Books) -> Iterator[Finding]:
    """Whichever attempts brought it; one that was taken back leaves its place free."""
    seen: dict[tuple[int, int, int], int] = {}
    for (tree, number, _, offset), accepted in books.allocator.turns.items():
        seen[tree, number, offset] = seen.get((tree, number, offset), 0) + len(accepted)
    for tree, number, _, offset in books.allocator.discarded:
        seen[tree, number, offset] = seen.get((tree, number, offset), 0) - 1
    for (tree, number, offset), count in seen.items():
        if count < 0:
            yield odd(f"tree={tree}/lease={number}/turn={offset}", "discarded, never accepted")
        if count > 1:
            yield twice(f"tree={tree}/lease={number}/turn={offset}", f"accepted {count} times")


def turns_not_accepted_crossed_an_end(books: Books) -> Iterator[Finding]:
    """A turn may come when its lease has ended otherwise, or never come: its connection was lost."""
    book, sampled = books.allocator, _sampled(books)
    for turn in sorted(sampled.keys() - book.turns.keys()):
        ends = book.ended.get(turn[:3], [])
        if turn[:3] not in book.issued:
            yield odd(turn_name(turn), "sampled in a lease that was never issued")
        elif ends and ends[0].kind in DELIVERED:
            yield lost(turn_name(turn), f"sampled in a continuation that {ends[0].kind}, never accepted")
        elif ends and ends[0].kind == "declined":
            yield odd(turn_name(turn), "sampled in a lease that was declined unstarted")


def tokens_not_accepted_are_as_the_actors_wrote(books: Books) -> Iterator[Finding]:
    """Of what the allocator was told and did not take, the actors' journals say the same."""
    book, sampled, elsewhere = books.allocator, _sampled(books), _without_a_journal(books)
    for turn, tokens in book.told_turns.items():
        if turn in book.turns or book.holders.get(turn[:3], "") in elsewhere:
            continue
        if turn not in sampled:
            yield odd(turn_name(turn), "reported and not accepted, in no actor's journal")
        elif sampled[turn][0] != tokens:
            yield odd(turn_name(turn), f"reported with {tokens} tokens, sampled with {sampled[turn][0]}")
    for lease, tokens in book.told_discarded.items():
        written = sum(actor.discarded[lease] for actor in books.actors)
        if written != tokens and book.holders.get(lease, "") not in elsewhere:
            yield odd(lease_name(lease), f"{tokens} tokens said to be discarded, {written} written down")


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


LAWS: tuple[Law, ...] = (
    each_issued_lease_ends_once,
    every_actor_has_a_journal,
    accepted_results_are_in_an_actors_journal,
    actors_results_are_accepted_or_explained,
    each_granted_lease_ends_once_at_its_actor,
    accepted_turns_were_sampled,
    each_place_holds_one_accepted_turn,
    turns_not_accepted_crossed_an_end,
    tokens_not_accepted_are_as_the_actors_wrote,
    turns_of_a_result_were_accepted,
    tokens_of_a_tree_are_those_accepted,
    *TREE_LAWS,
)
