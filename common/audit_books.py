"""The journals of a run, read into sets and maps that can be compared.

    allocator/journal.tw ──▶ AllocatorBook     what it issued, was told and decided
    actors/*/journal.tw  ──▶ ActorBook (each)  what was granted, sampled and ended there
    learner/journal.tw   ──▶ LearnerBook       what was received, trained, dropped and committed

Each role writes its journal on its own, so a message that is lost, repeated or invented shows as a
difference. Records of kinds that the audit does not know are passed over.

A learner that starts again takes back what it had done beyond its checkpoint: the books hold what survives,
and beside it what was abandoned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import StorageError
from common.journal import Record, read_journal

LeaseKey = tuple[int, int, int]
"""(tree, number, epoch): one attempt at one continuation."""
TurnKey = tuple[int, int, int, int]
"""(tree, number, epoch, offset)."""

CHECKPOINT_LOST = "checkpoint_lost"
"""Why the allocator drops a tree that it had as committed: the learner came back from an older checkpoint."""
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class End:
    """How a lease ended, as one role saw it."""

    kind: str
    turns: int
    detail: str = ""


@dataclass(slots=True)
class AllocatorBook:
    opened: Counter[int] = field(default_factory=Counter)
    issued: Counter[LeaseKey] = field(default_factory=Counter)
    holders: dict[LeaseKey, str] = field(default_factory=dict)
    """Peer that each lease was issued to."""
    ended: dict[LeaseKey, list[End]] = field(default_factory=lambda: defaultdict(list))
    turns: dict[TurnKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Action tokens of each accepted turn, once per acceptance."""
    discarded: dict[TurnKey, int] = field(default_factory=dict)
    """Action tokens of turns that were accepted and are to be sampled again by a later attempt."""
    ready: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Tree -> action tokens, once per record."""
    dropped: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Tree -> (reason, action tokens), once per record."""
    delivered: set[int] = field(default_factory=set)
    consumed: set[int] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    """In a checkpoint that was not lost afterwards."""
    told_turns: dict[TurnKey, int] = field(default_factory=dict)
    """Action tokens of each turn that was reported to it, accepted or not."""
    told_discarded: dict[LeaseKey, int] = field(default_factory=dict)
    """Action tokens that each `Failed` said were thrown away."""
    recoveries: list[float] = field(default_factory=list)
    """Seconds that each process took which went on after another one had died."""
    goodbyes: set[str] = field(default_factory=set)
    """Peers whose goodbye it heard, hence all that they had said before."""
    closed: bool = False
    """Whether it ended in order: without an `end` record it was killed."""
    trees_in_flight: set[int] | int = 0
    on_the_wire: set[int] = field(default_factory=set)
    """Delivered, and no learner had confirmed them as written down, when the allocator ended."""
    leases_in_flight: set[LeaseKey] | int = 0

    @property
    def tokens_accepted(self) -> int:
        """Once per turn, those included that were taken back later."""
        return sum(tokens[0] for tokens in self.turns.values())

    def still_has(self, tree: int) -> bool:
        """Whether it listed the tree as in flight at its end."""
        listed = self.trees_in_flight
        return listed > 0 if isinstance(listed, int) else tree in listed

    def lost_with_a_checkpoint(self, tree: int) -> bool:
        return any(reason == CHECKPOINT_LOST for reason, _ in self.dropped.get(tree, ()))


@dataclass(slots=True)
class ActorBook:
    """One actor's journal; `alive` leases are those of an incarnation that did not end in order."""

    path: Path
    peers: set[str] = field(default_factory=set)
    granted: Counter[LeaseKey] = field(default_factory=Counter)
    turns: dict[TurnKey, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Action tokens of each reported turn, once per record."""
    ended: dict[LeaseKey, list[End]] = field(default_factory=lambda: defaultdict(list))
    cut_off: set[LeaseKey] = field(default_factory=set)
    """Held, and not ended, by a process that was killed."""
    discarded: Counter[LeaseKey] = field(default_factory=Counter)
    """Action tokens sampled by each lease and not reported as a turn."""

    @property
    def tokens_reported(self) -> int:
        """In turns that were reported, taken or not."""
        return sum(sum(tokens) for tokens in self.turns.values())

    @property
    def tokens_discarded(self) -> int:
        return sum(self.discarded.values())

    @property
    def name(self) -> str:
        """Its directory's name."""
        return self.path.parent.name


@dataclass(frozen=True, slots=True)
class Batch:
    """One update, and what it says became of the action tokens of its trees."""

    trees: tuple[int, ...]
    lineage: int
    step: int
    trained: int
    no_contrast: int
    """Of branches whose advantage is zero."""
    context: int
    """Too old, or of branches without credit."""

    @property
    def tokens(self) -> int:
        return self.trained + self.no_contrast + self.context


@dataclass(slots=True)
class LearnerBook:
    present: bool = False
    sender: str = ""
    """The newest start, as the allocator knows it."""
    received: dict[int, int] = field(default_factory=dict)
    """Tree -> action tokens."""
    held: set[int] = field(default_factory=set)
    """Received by the newest start: what earlier ones had not trained went with their memory."""
    trained: Counter[int] = field(default_factory=Counter)
    """Times each tree was trained in the surviving lineage."""
    trained_at: dict[int, int] = field(default_factory=dict)
    """Tree -> step of the update it is in, in the surviving lineage."""
    settled: set[int] = field(default_factory=set)
    """Trained in the surviving lineage, by a start before the newest."""
    abandoned: set[int] = field(default_factory=set)
    """Trained beyond the step a restarted learner resumed from."""
    batches: list[Batch] = field(default_factory=list)
    """Updates of the surviving lineage."""
    abandoned_batches: list[Batch] = field(default_factory=list)
    dropped: dict[int, list[tuple[str, int]]] = field(default_factory=lambda: defaultdict(list))
    """Tree -> (reason, action tokens), once per record; forgotten if a later start received it again."""
    ever_dropped: set[int] = field(default_factory=set)
    committed_step: int = -1
    closed: bool = False
    queued: set[int] | int = 0

    @property
    def tokens_dropped(self) -> int:
        return sum(tokens for drops in self.dropped.values() for _, tokens in drops)


@dataclass(slots=True)
class Books:
    """All the journals of one run."""

    allocator: AllocatorBook
    actors: list[ActorBook]
    learner: LearnerBook


def read_books(allocator: Path, actors: Iterable[Path], learner: Path) -> Books:
    """Read every journal. The learner's may be missing (it never started); an actor's too.

    Raises:
        StorageError: the allocator's journal is missing, or one is damaged.
    """
    if not allocator.is_file():
        raise StorageError(f"there is no {allocator}: the run has no allocator journal, so nothing to audit")
    return Books(
        _read_allocator(read_journal(allocator)),
        [_read_actor(path) for path in actors],
        read_learner(read_journal(learner)) if learner.is_file() else LearnerBook(),
    )


def _lease(fields: dict[str, Any]) -> LeaseKey:
    return fields["tree"], fields["number"], fields["epoch"]


def _ids(value: Any) -> Any:
    """A list of ids (or of lease triples) as a set; a bare count stays one."""
    if isinstance(value, int):
        return value
    return {tuple(item) if isinstance(item, (list, tuple)) else item for item in value}


def _read_allocator(records: Iterable[Record]) -> AllocatorBook:
    book = AllocatorBook()
    for record in records:
        fields = record.fields
        match record.kind:
            case "input":
                _read_input(book, str(fields["peer"]), fields["message"])
            case "tree_opened":
                book.opened[fields["tree"]] += 1
            case "lease_issued":
                book.issued[_lease(fields)] += 1
                book.holders[_lease(fields)] = str(fields.get("peer", ""))
            case "lease_ended":
                end = End(fields["kind"], fields["turns"], str(fields.get("reason", "")))
                book.ended[_lease(fields)].append(end)
            case "turn_accepted":
                book.turns[(*_lease(fields), fields["offset"])].append(fields["tokens"])
            case "turn_discarded":
                book.discarded[(*_lease(fields), fields["offset"])] = fields["tokens"]
            case "tree_ready":
                book.ready[fields["tree"]].append(fields["tokens"])
            case "tree_dropped":
                book.dropped[fields["tree"]].append((str(fields["reason"]), fields["tokens"]))
                if fields["reason"] == CHECKPOINT_LOST:
                    book.committed.discard(fields["tree"])
            case "tree_delivered":
                book.delivered.add(fields["tree"])
            case "tree_consumed":
                book.consumed.add(fields["tree"])
            case "tree_committed":
                book.committed.add(fields["tree"])
            case "start":  # of the first process, or of one that goes on where another died or was stopped
                book.closed = False
                book.trees_in_flight = book.leases_in_flight = 0
                book.on_the_wire = set()
            case "recovered":
                book.recoveries.append(float(fields["seconds"]))
            case "end":
                book.closed = True
                book.trees_in_flight = _ids(fields["in_flight_trees"])
                book.leases_in_flight = _ids(fields["in_flight_leases"])
                book.on_the_wire = _ids(fields.get("on_the_wire_trees", ()))
    return book


def _read_input(book: AllocatorBook, peer: str, message: dict[str, Any]) -> None:
    """What the allocator was told that its decisions do not show."""
    match message.get("type"):
        case "Expanded":
            turn = (*_lease(message["lease"]), message["offset"])
            book.told_turns[turn] = len(message["turn"].get("action", b"")) // TOKEN_BYTES
        case "Failed":
            book.told_discarded[_lease(message["lease"])] = message.get("discarded_tokens", 0)
        case "Bye":
            book.goodbyes.add(peer)


def _read_actor(path: Path) -> ActorBook:
    book, held = ActorBook(path), set[LeaseKey]()
    for record in read_journal(path):
        fields = record.fields
        match record.kind:
            case "start":
                book.cut_off |= held
                held.clear()
                book.peers |= {str(fields["peer"]), f"{fields['peer']}/{fields['incarnation']}"}
            case "granted":
                book.granted[_lease(fields)] += 1
                held.add(_lease(fields))
            case "turn":
                book.turns[(*_lease(fields), fields["offset"])].append(fields["tokens"])
            case "ended":
                book.ended[_lease(fields)].append(End(fields["kind"], fields["turns"]))
                book.discarded[_lease(fields)] += fields["discarded_tokens"]
                held.discard(_lease(fields))
            case "end":
                held.clear()  # an orderly end leaves nothing held; what is missing then is lost
    book.cut_off |= held
    return book


def read_learner(records: Iterable[Record]) -> LearnerBook:
    """The learner's journal."""
    book = LearnerBook(present=True)
    for record in records:
        fields = record.fields
        match record.kind:
            case "start":
                book.sender = str(fields["incarnation"])
                _resume(book, fields["step"])
            case "received":
                _receive(book, fields["tree"], fields["tokens"])
            case "consumed":
                batch = _batch(fields)
                book.batches.append(batch)
                for tree in batch.trees:
                    book.trained[tree] += 1
                    book.trained_at[tree] = batch.step
            case "dropped":
                book.dropped[fields["tree"]].append((str(fields["reason"]), fields["tokens"]))
                book.ever_dropped.add(fields["tree"])
            case "committed":
                book.committed_step = max(book.committed_step, fields["step"])
            case "end":
                book.closed, book.queued = True, _ids(fields["queued"])
    return book


def _batch(fields: dict[str, Any]) -> Batch:
    return Batch(
        trees=tuple(fields["trees"]),
        lineage=fields["lineage"],
        step=fields["step"],
        trained=fields["tokens_trained"],
        no_contrast=fields.get("tokens_no_contrast", 0),
        context=fields["tokens_context"],
    )


def _receive(book: LearnerBook, tree: int, tokens: int) -> None:
    """A tree arrives. If an earlier start dropped it, the allocator has not heard of that: it counts anew."""
    if tree not in book.held:
        book.dropped.pop(tree, None)
    book.received[tree] = tokens
    book.held.add(tree)


def _resume(book: LearnerBook, step: int) -> None:
    """A learner starts at `step`: what was trained beyond it belongs to an abandoned lineage."""
    gone = {tree for tree, at in book.trained_at.items() if at > step}
    book.abandoned |= gone
    for tree in gone:
        del book.trained_at[tree]
        del book.trained[tree]
    book.abandoned_batches += [batch for batch in book.batches if batch.step > step]
    book.batches = [batch for batch in book.batches if batch.step <= step]
    book.settled = set(book.trained_at)
    book.held.clear()
    book.committed_step = step  # it has loaded that checkpoint, whether or not its writer lived to say so
    book.closed = False
