"""One small sound run as journals, and changes to make to a copy of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common.audit import AuditReport, audit_run
from common.journal import JournalWriter
from common.rundir import RunDir

Entry = tuple[str, dict[str, Any]]
Journals = dict[str, list[Entry]]
Change = Callable[[Journals], None]


def lease(tree: int, number: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"tree": tree, "number": number, "epoch": epoch, **more}


def told(type: str, peer: str = "", /, **message: Any) -> Entry:
    """What the allocator was told."""
    return "input", {"peer": peer, "now": 0.0, "message": {"type": type, **message}}


def start(incarnation: str, lineage: int, step: int) -> Entry:
    """Of a learner, with the weights of `step`."""
    return "start", {"incarnation": f"learner/{incarnation}", "lineage": lineage, "step": step}


def update(
    trees: list[int], step: int, *, trained: int, no_contrast: int = 0, context: int = 0, lineage: int = 0
) -> Entry:
    """Of the learner's journal."""
    tokens = {"tokens_trained": trained, "tokens_no_contrast": no_contrast, "tokens_context": context}
    return "consumed", {"trees": trees, "lineage": lineage, "step": step, **tokens}


def sound_run() -> Journals:
    """Trees 0 and 1 trained in step 1, tree 2 dropped by the allocator, 3 dropped by the learner, 4 in flight.

    Lease 0.0 of tree 0 was first held by an actor that was killed after one turn, and resumed by another.
    Lease 1.1 was revoked; its result crossed the revocation and was discarded. Before that, another attempt at it
    had its last turn taken back. The failure of lease 4.0 was not heard any more.
    """
    allocator: list[Entry] = []
    alive: list[Entry] = [("start", {"peer": "actor-0", "incarnation": "aa"})]
    killed: list[Entry] = [("start", {"peer": "actor-1", "incarnation": "bb"})]

    def issue(actor: list[Entry], peer: str, tree: int, number: int, epoch: int = 0) -> None:
        allocator.append(("lease_issued", lease(tree, number, epoch, peer=peer)))
        actor.append(("granted", lease(tree, number, epoch)))
        actor.append(("starting", lease(tree, number, epoch)))

    def turn(
        actor: list[Entry], tree: int, number: int, epoch: int, offset: int, accepted: bool = True
    ) -> None:
        actor.append(("turn", lease(tree, number, epoch, offset=offset, tokens=3)))
        turn = {"action": bytes(12)}
        allocator.append(told("Expanded", lease=lease(tree, number, epoch), offset=offset, turn=turn))
        if accepted:
            allocator.append(("turn_accepted", lease(tree, number, epoch, offset=offset, tokens=3)))

    def end(
        actor: list[Entry] | None,
        kind: str,
        seen: str,
        tree: int,
        number: int,
        epoch: int,
        turns: int,
        discarded: int = 0,
    ) -> None:
        if seen == "failed":
            allocator.append(told("Failed", lease=lease(tree, number, epoch), discarded_tokens=discarded))
        allocator.append(("lease_ended", lease(tree, number, epoch, kind=kind, turns=turns, reason="")))
        if actor is not None:
            ended = lease(tree, number, epoch, kind=seen, turns=turns, discarded_tokens=discarded)
            actor.append(("ended", ended))

    for tree in range(5):
        allocator.append(("tree_opened", {"tree": tree, "task": f"t/{tree}", "wave": 0}))
    issue(killed, "actor-1/bb", 0, 0)
    turn(killed, 0, 0, 0, 0)
    end(None, "expired", "", 0, 0, 0, 1)
    issue(alive, "actor-0/aa", 0, 0, 1)
    turn(alive, 0, 0, 1, 1)
    end(alive, "finished", "finished", 0, 0, 1, 2)
    issue(alive, "actor-0/aa", 1, 0)
    turn(alive, 1, 0, 0, 0)
    end(alive, "horizon", "horizon", 1, 0, 0, 1)
    issue(alive, "actor-0/aa", 1, 1)
    turn(alive, 1, 1, 0, 0)
    end(alive, "fenced", "failed", 1, 1, 0, 1)
    allocator.append(("turn_discarded", lease(1, 1, offset=0, tokens=3)))
    issue(alive, "actor-0/aa", 1, 1, 1)
    turn(alive, 1, 1, 1, 0, accepted=False)
    end(alive, "revoked", "finished", 1, 1, 1, 1)
    issue(alive, "actor-0/aa", 2, 0)
    end(alive, "failed", "failed", 2, 0, 0, 0, discarded=5)
    issue(alive, "actor-0/aa", 3, 0)
    turn(alive, 3, 0, 0, 0)
    end(alive, "finished", "finished", 3, 0, 0, 1)
    issue(alive, "actor-0/aa", 4, 0)
    alive.append(("ended", lease(4, 0, kind="failed", turns=0, discarded_tokens=2)))
    alive.append(("end", {}))

    allocator.append(("tree_dropped", {"tree": 2, "reason": "no_outcome", "tokens": 0}))
    for tree, tokens in ((0, 6), (1, 3), (3, 3)):
        allocator.append(("tree_ready", {"tree": tree, "tokens": tokens}))
        allocator.append(("tree_delivered", {"tree": tree}))
    allocator.append(("tree_dropped", {"tree": 3, "reason": "stale", "tokens": 3}))
    for tree in (0, 1):
        allocator.append(("tree_consumed", {"tree": tree, "lineage": 0, "step": 1}))
    for tree in (0, 1):
        allocator.append(("tree_committed", {"tree": tree}))
    allocator.append(told("Bye", "learner/cc", code=0))
    end_of_all = {"in_flight_trees": [4], "in_flight_leases": [[4, 0, 0]], "on_the_wire_trees": []}
    allocator.append(("end", end_of_all))
    trained = update([0, 1], 1, trained=5, no_contrast=1, context=3)
    learner: list[Entry] = [
        start("cc", 0, 0),
        ("received", {"tree": 0, "tokens": 6}),
        ("received", {"tree": 1, "tokens": 3}),
        ("received", {"tree": 3, "tokens": 3}),
        ("dropped", {"tree": 3, "reason": "stale", "tokens": 3}),
        trained,
        ("committed", {"lineage": 0, "step": 1}),
        ("end", {"queued": []}),
    ]
    return {"allocator": allocator, "actor-0": alive, "actor-1": killed, "learner": learner}


def write(tmp_path: Path, journals: Journals) -> RunDir:
    rundir = RunDir.create(tmp_path, "run")
    for name, entries in journals.items():
        path = rundir.path / ("actors" if name.startswith("actor-") else "") / name / "journal.tw"
        with patch("os.fsync"), JournalWriter(path) as journal:  # no disk is to survive anything here
            for kind, fields in entries:
                journal.append(kind, **fields)
    return rundir


def audit(tmp_path: Path, journals: Journals) -> AuditReport:
    return audit_run(write(tmp_path, journals))


def where(entries: list[Entry], kind: str, /, **fields: Any) -> int:
    """Index of the one entry of this kind with these fields."""
    found = [i for i, (k, f) in enumerate(entries) if k == kind and fields.items() <= f.items()]
    assert len(found) == 1, f"{kind} {fields}: {len(found)} entries"
    return found[0]


def without(name: str, kind: str, /, **fields: Any) -> Change:
    def change(journals: Journals) -> None:
        del journals[name][where(journals[name], kind, **fields)]

    return change


def again(name: str, kind: str, /, **fields: Any) -> Change:
    def change(journals: Journals) -> None:
        at = where(journals[name], kind, **fields)
        journals[name].insert(at, journals[name][at])

    return change


def altered(name: str, kind: str, match: dict[str, Any], /, **fields: Any) -> Change:
    def change(journals: Journals) -> None:
        at = where(journals[name], kind, **match)
        journals[name][at] = (kind, {**journals[name][at][1], **fields})

    return change


def added(name: str, kind: str, /, **fields: Any) -> Change:
    """An entry more, before the last one, which may be the end."""

    def change(journals: Journals) -> None:
        journals[name].insert(len(journals[name]) - 1, (kind, fields))

    return change


def both(*changes: Change) -> Change:
    def change(journals: Journals) -> None:
        for one in changes:
            one(journals)

    return change


def inserted(name: str, at: int, *entries: Entry) -> Change:
    """Entries more, before the one at `at`, which may count from the end."""

    def change(journals: Journals) -> None:
        journals[name][at:at] = entries

    return change
