"""The core's books as bytes, and back.

    freeze(core) -> bytes ─────▶ thaw(a fresh core, bytes): it goes on as the frozen one does

Everything is kept that decides what comes next, peers and reminders included: a journal is replayed from a
snapshot on, and what stands there was said by peers that only the books know. What nobody will ask for any
more (reminders that came to nothing, outdated entries of a heap) is left behind, what follows from the
configuration is made anew, and the predictor and the budget write themselves (`to_state`).

Which fields are kept is said here once: of dataclasses all but those in `LEFT_OUT`, of the other classes
those listed. A test compares both with the classes, so that no field can be forgotten. Bytes are msgpack,
decoded against the types of the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter
from types import GenericAlias
from typing import Any, get_type_hints

import msgspec

from allocator.core import AllocatorCore
from allocator.delivery import Delivery, Parcel, TreeState
from allocator.forest import Forest
from allocator.leases import LeaseBook
from allocator.peers import Peer, PeerTable
from allocator.state import CoreState, Exit
from allocator.tree import Branch, GrowingTree
from allocator.waves import Waves
from common.errors import StorageError
from common.nouns import LeaseId, Version
from common.predictor import Target

Place = tuple[int, int]
"""(tree, number): a continuation."""
Timer = tuple[float, int, str, list[int], str, int]
"""(when, order, kind, [tree, number, epoch] as far as they apply, peer, epoch)."""

CONFIGURED = "follows from the configuration"
IN_PARTS = "written part by part"
BY_ITSELF = "writes itself: to_state, from_state"
REBUILT = "rebuilt from the others"
HANDED_OVER = "empty between inputs: the loop takes it"
NOT_STATE = "looks on, decides nothing"

LEFT_OUT: dict[type, dict[str, str]] = {
    AllocatorCore: {"state": IN_PARTS, "_begun": IN_PARTS},
    CoreState: {
        "settings": CONFIGURED, "rule": CONFIGURED, "budget": BY_ITSELF, "predictor": BY_ITSELF,
        "peers": IN_PARTS, "leases": IN_PARTS, "forest": IN_PARTS, "delivery": IN_PARTS, "waves": IN_PARTS,
        "sends": HANDED_OVER, "records": HANDED_OVER, "departed": HANDED_OVER,
    },
    PeerTable: {"by_name": REBUILT, "_heap": REBUILT},
    LeaseBook: {"peers": IN_PARTS},
    Forest: {
        "settings": CONFIGURED, "rule": CONFIGURED, "budget": BY_ITSELF, "predictor": BY_ITSELF,
        "_kinds_out": CONFIGURED, "speculates": CONFIGURED, "_reads": CONFIGURED,
        "_reads_predictor": CONFIGURED, "watch": NOT_STATE,
    },
    Delivery: {"settings": CONFIGURED, "pool": CONFIGURED},
    Waves: {"predictor": BY_ITSELF, "budget": BY_ITSELF, "batch": CONFIGURED},
    Branch: {"tree": REBUILT},
    GrowingTree: {
        "predictor": BY_ITSELF, "prefixes": REBUILT, "predictions": REBUILT, "predicted_for": REBUILT,
    },
    Peer: {},
    Parcel: {},
}  # fmt: skip
"""Fields that are not in a snapshot, and why."""


class Form:
    """How objects of a class are written: an array of its fields, each as itself or as something plainer."""

    def __init__(self, of: type, fields: dict[str, Any]) -> None:
        self.names = tuple(fields)
        self.type: Any = msgspec.defstruct(f"Frozen{of.__name__}", list(fields.items()), array_like=True)
        self.many: Any = GenericAlias(list, (self.type,))
        self._values = attrgetter(*self.names)

    def write(self, subject: object, **plainer: Any) -> Any:
        """`subject` as it is written, with these fields made plainer."""
        frozen = self.type(*self._values(subject))
        for name, value in plainer.items():
            setattr(frozen, name, value)
        return frozen

    def read(self, frozen: Any, **rebuilt: Any) -> dict[str, Any]:
        """The fields that were written, those made plainer as they were before."""
        return {n: rebuilt[n] if n in rebuilt else getattr(frozen, n) for n in self.names}

    def restore(self, subject: object, frozen: Any, **rebuilt: Any) -> None:
        """Give a fresh `subject` the fields that were written."""
        for name, value in self.read(frozen, **rebuilt).items():
            kind = type(getattr(subject, name))
            setattr(subject, name, kind(value) if kind in (deque, Counter) else value)


def _dataclass(of: type, **plainer: Any) -> Form:
    hints = get_type_hints(of)
    names = [field.name for field in dataclasses.fields(of) if field.name not in LEFT_OUT[of]]
    return Form(of, {name: plainer.get(name, hints[name]) for name in names})


BRANCH = _dataclass(Branch)
TREE = _dataclass(GrowingTree, branches=BRANCH.many, returned=BRANCH.many)
PEER = _dataclass(
    Peer,
    queued=list[Place],
    running=list[Place],
    inspecting=list[int],
    stopping=list[LeaseId],
    taken=list[tuple[LeaseId, set[int]]],
)
PARCEL = _dataclass(Parcel)
PEERS = Form(
    PeerTable,
    {
        "members": PEER.many, "retired": list[str], "free": int, "idle": list[str],
        "hoarding": list[str], "actors_alive": int, "learner": str, "_orders": int,
    },
)  # fmt: skip
LEASES = Form(
    LeaseBook,
    {
        "issued": int, "live": int, "ended": dict[str, int], "pending": int, "first_epoch": int,
        "_heap": list[Place],
    },
)  # fmt: skip
FOREST = Form(
    Forest,
    {
        "trees": TREE.many, "settled": list[int], "wanting": list[tuple[int, int]], "rejected": list[int],
        "chosen": list[int], "parked": dict[int, set[int]], "candidates": int, "inspecting": int,
        "changed": int, "unlocked": int, "decided": int, "grown": int, "speculative": int,
        "account": dict[str, int], "oldest_score": int,
    },
)  # fmt: skip
DELIVERY = Form(
    Delivery,
    {
        "pools": dict[int, int], "parcels": PARCEL.many, "states": dict[TreeState, int], "opened": int,
        "dropped": dict[str, int], "committed": int, "committed_at": dict[int, list[tuple[int, int]]],
        "credit": int, "sent": int, "_ready": list[int], "_next_slot": int, "_free_slots": list[int],
    },
)  # fmt: skip
WAVES = Form(
    Waves,
    {
        "next": int, "censored": int, "targets": int, "_done": dict[int, set[int]],
        "_evidence": dict[int, list[tuple[int, list[Target]]]],
    },
)  # fmt: skip
STATE = Form(
    CoreState,
    {
        "now": float, "version": Version | None, "weights_endpoint": str, "hints_endpoint": str,
        "tokenizer_hash": str, "ending": Exit | None, "learner_since": float, "uninspected": list[int],
        "counts": dict[str, int], "waited": dict[str, int], "_timers": list[Timer], "_timer_number": int,
    },
)  # fmt: skip
FORMS: dict[type, Form] = {
    CoreState: STATE, PeerTable: PEERS, LeaseBook: LEASES, Forest: FOREST, Delivery: DELIVERY, Waves: WAVES,
    Branch: BRANCH, GrowingTree: TREE, Peer: PEER, Parcel: PARCEL,
}  # fmt: skip
BOOKS: Any = msgspec.defstruct(
    "Books",
    [
        ("names", list[str]), ("begun", bool), ("state", STATE.type), ("peers", PEERS.type),
        ("leases", LEASES.type), ("forest", FOREST.type), ("delivery", DELIVERY.type), ("waves", WAVES.type),
        ("predictor", dict[str, Any]), ("budget", dict[str, Any]),
    ],
    array_like=True,
)  # fmt: skip


@functools.cache
def shape() -> str:
    """Names the fields and types of what `freeze` writes: what another release wrote may have others."""
    fields = [
        (kind.__name__, name, str(hint))
        for kind, form in FORMS.items()
        for name, hint in get_type_hints(form.type).items()
    ]
    return hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()


# ------------------------------------------------------------------------------------------------ freeze


def freeze(core: AllocatorCore) -> bytes:
    """The books of a core between two inputs, its records and sends taken."""
    s = core.state
    books = BOOKS(
        names=_names(s),
        begun=core._begun,
        state=STATE.write(
            s,
            uninspected=[tree.id for tree in s.uninspected],
            _timers=sorted(_timers(s)),
        ),
        peers=_write_peers(s.peers),
        leases=LEASES.write(s.leases, _heap=[(tree, number) for tree, number, _ in s.leases._heap]),
        forest=FOREST.write(
            s.forest,
            trees=list(map(_write_tree, s.forest.trees.values())),
            **{name: list(getattr(s.forest, name)) for name in ("settled", "rejected", "chosen")},
        ),
        delivery=DELIVERY.write(s.delivery, parcels=list(map(PARCEL.write, s.delivery.parcels.values()))),
        waves=WAVES.write(s.waves),
        predictor=s.predictor.to_state(),
        budget=s.budget.to_state(),
    )
    return msgspec.msgpack.encode(books)


def _names(s: CoreState) -> list[str]:
    return [s.rule.name, s.budget.name, type(s.predictor).__name__]


def _write_tree(tree: GrowingTree) -> Any:
    branches, returned = map(BRANCH.write, tree.branches.values()), map(BRANCH.write, tree.returned)
    return TREE.write(tree, branches=list(branches), returned=list(returned))


def _write_peers(table: PeerTable) -> Any:
    members = [
        PEER.write(
            peer,
            queued=list(map(_place, peer.queued)),
            running=list(map(_place, peer.running)),
            inspecting=list(peer.inspecting),
            stopping=list(peer.stopping),
            taken=list(peer.taken.items()),
        )
        for peer in table.members.values()
    ]
    return PEERS.write(
        table,
        members=members,
        retired=list(table.retired),
        idle=[peer.key for peer in table.idle],
        hoarding=[peer.key for peer in table.hoarding],
        learner=table.learner.key if table.learner is not None else "",
    )


def _place(branch: Branch) -> Place:
    return branch.tree.id, branch.number


def _timers(s: CoreState) -> Iterator[Timer]:
    for entry in s._timers:
        _, _, kind, subject, epoch = entry
        if kind == "lease" and (subject.epoch != epoch or not subject.live):
            continue  # most of them: a lease is mostly over before it is overdue
        timer = _timer(s, *entry)
        if timer is not None:
            yield timer


def _timer(s: CoreState, when: float, order: int, kind: str, subject: Any, epoch: int) -> Timer | None:
    """A reminder by names; None when nothing can come of it any more."""
    members = s.peers.members
    match kind:
        case "lease":
            return when, order, kind, list(_place(subject)), "", epoch
        case "inspect":
            alive = subject.id in s.forest.trees and bool(subject.inspector) and subject.inspections == epoch
            return (when, order, kind, [subject.id], "", epoch) if alive else None
        case "silence" | "rest":
            alive = members.get(subject.key) is subject
            return (when, order, kind, [], subject.key, epoch) if alive else None
        case "stopping":
            key, lease = subject
            alive = key in members and lease in members[key].stopping
            ids = [lease.tree, lease.number, lease.epoch]
            return (when, order, kind, ids, key, epoch) if alive else None
    raise RuntimeError(f"a snapshot knows no reminders of the kind {kind!r}")


# -------------------------------------------------------------------------------------------------- thaw


def thaw(core: AllocatorCore, data: bytes) -> None:
    """Give a core that nothing has happened to the books of one that was frozen.

    Raises:
        StorageError: they are damaged, of another release, or of another rule, budget or predictor.
    """
    s = core.state
    try:
        books = msgspec.msgpack.decode(data, type=BOOKS)
        if books.names != _names(s):
            wrote, here = ", ".join(books.names), ", ".join(_names(s))
            raise StorageError(f"the snapshot is of a run with {wrote}, this one has {here}")
        s.predictor.from_state(books.predictor)
        s.budget.from_state(books.budget)
        _read_forest(s, books.forest)
        _read_peers(s, books.peers)
        _read_rest(s, books)
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise StorageError(f"the snapshot does not fit this release: {error}") from error
    core._begun = books.begun


def _read_rest(s: CoreState, books: Any) -> None:
    heap = [(tree, number, s.forest.trees[tree].branches[number]) for tree, number in books.leases._heap]
    LEASES.restore(s.leases, books.leases, _heap=heap)
    parcels = [Parcel(**PARCEL.read(parcel)) for parcel in books.delivery.parcels]
    DELIVERY.restore(s.delivery, books.delivery, parcels={parcel.tree.id: parcel for parcel in parcels})
    WAVES.restore(s.waves, books.waves)
    STATE.restore(
        s,
        books.state,
        uninspected=[s.forest.trees[tree] for tree in books.state.uninspected],
        _timers=[_reminder(s, *timer) for timer in books.state._timers],
    )


def _read_forest(s: CoreState, frozen: Any) -> None:
    trees = {}
    for each in frozen.trees:
        tree = GrowingTree(predictor=s.predictor, **TREE.read(each, branches={}, returned=[]))
        # Its tree is a branch's first field: one by name takes twice as long, and there are many.
        tree.branches.update({b.number: Branch(tree, *msgspec.structs.astuple(b)) for b in each.branches})
        tree.returned.extend(Branch(tree, *msgspec.structs.astuple(b)) for b in each.returned)
        trees[tree.id] = tree
    FOREST.restore(s.forest, frozen, trees=trees)


def _read_peers(s: CoreState, frozen: Any) -> None:
    trees = s.forest.trees
    members = {}
    for each in frozen.members:
        peer = Peer(
            **PEER.read(
                each,
                queued={trees[tree].branches[number]: None for tree, number in each.queued},
                running={trees[tree].branches[number]: None for tree, number in each.running},
                inspecting=dict.fromkeys(each.inspecting),
                stopping=dict.fromkeys(each.stopping),
                taken=dict(each.taken),
            )
        )
        members[peer.key] = peer
    table = s.peers
    PEERS.restore(
        table,
        frozen,
        members=members,
        retired=dict.fromkeys(frozen.retired),
        idle={members[key]: None for key in frozen.idle},
        hoarding={members[key]: None for key in frozen.hoarding},
        learner=members[frozen.learner] if frozen.learner else None,
    )
    table.by_name = {(peer.role, peer.name): peer for peer in members.values()}
    usable = [peer for peer in members.values() if peer.room > 0]
    table._heap = [(peer.load / peer.capabilities.slots, peer.order, peer.stamp, peer) for peer in usable]
    heapq.heapify(table._heap)


def _reminder(s: CoreState, when: float, order: int, kind: str, ids: list[int], key: str, epoch: int) -> Any:
    """A reminder as the core keeps it."""
    subject: Any
    match kind:
        case "lease":
            subject = s.forest.trees[ids[0]].branches[ids[1]]
        case "inspect":
            subject = s.forest.trees[ids[0]]
        case "stopping":
            subject = (key, LeaseId(*ids))
        case _:
            subject = s.peers.members[key]
    return when, order, kind, subject, epoch
