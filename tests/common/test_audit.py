"""One small sound run as three journals, and for each law a copy with exactly that law broken."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.audit import AuditReport, audit_run, run_audit
from common.audit_laws import DUPLICATED, LAWS, LOST, UNEXPLAINED
from common.config import AuditConfig, Config
from common.errors import StorageError
from common.journal import JournalWriter
from common.rundir import RunDir

Entry = tuple[str, dict[str, Any]]
Journals = dict[str, list[Entry]]


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of journals are written here, and no disk is to survive anything."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def lease(tree: int, number: int, epoch: int = 0, **more: Any) -> dict[str, Any]:
    return {"tree": tree, "number": number, "epoch": epoch, **more}


def sound_run() -> Journals:
    """Trees 0 and 1 trained in step 1, tree 2 dropped by the allocator, 3 dropped by the learner, 4 in flight.

    Lease 0.0 of tree 0 was first held by an actor that was killed after one turn, and resumed by another.
    Lease 1.1 was revoked; its result crossed the revocation and was discarded. Before that, another attempt at it
    had its last turn taken back.
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
        if accepted:
            allocator.append(("turn_accepted", lease(tree, number, epoch, offset=offset, tokens=3)))

    def end(
        actor: list[Entry] | None, kind: str, seen: str, tree: int, number: int, epoch: int, turns: int
    ) -> None:
        allocator.append(("lease_ended", lease(tree, number, epoch, kind=kind, turns=turns, reason="")))
        if actor is not None:
            ended = lease(tree, number, epoch, kind=seen, turns=turns, discarded_tokens=0)
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
    end(alive, "failed", "failed", 2, 0, 0, 0)
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
    allocator.append(("end", {"in_flight_trees": [4], "in_flight_leases": [[4, 0, 0]]}))
    trained = {"trees": [0, 1], "lineage": 0, "step": 1, "tokens_trained": 9, "tokens_context": 0}
    learner: list[Entry] = [
        ("start", {"incarnation": "cc", "lineage": 0, "step": 0}),
        ("received", {"tree": 0, "tokens": 6}),
        ("received", {"tree": 1, "tokens": 3}),
        ("received", {"tree": 3, "tokens": 3}),
        ("dropped", {"tree": 3, "reason": "stale", "tokens": 3}),
        ("consumed", trained),
        ("committed", {"lineage": 0, "step": 1}),
        ("end", {"queued": []}),
    ]
    return {"allocator": allocator, "actor-0": alive, "actor-1": killed, "learner": learner}


def write(tmp_path: Path, journals: Journals) -> RunDir:
    rundir = RunDir.create(tmp_path, "run")
    for name, entries in journals.items():
        path = rundir.path / ("actors" if name.startswith("actor-") else "") / name / "journal.tw"
        with JournalWriter(path) as journal:
            for kind, fields in entries:
                journal.append(kind, **fields)
    return rundir


def audit(tmp_path: Path, journals: Journals) -> AuditReport:
    return audit_run(write(tmp_path, journals))


def test_a_sound_run_has_nothing_lost_duplicated_or_unexplained(tmp_path: Path) -> None:
    report = audit(tmp_path, sound_run())
    assert report.findings == []
    assert report.last_line() == "audit: trees=5 leases=8 lost=0 duplicated=0 unexplained=0"
    assert "12 accepted = 12 ready + 0 dropped + 0 in flight" in "\n".join(report.lines())
    assert "1 no_outcome, 1 stale" in "\n".join(report.lines())


# ------------------------------------------------------------------------- one violation at a time


def where(entries: list[Entry], kind: str, /, **fields: Any) -> int:
    """Index of the one entry of this kind with these fields."""
    found = [i for i, (k, f) in enumerate(entries) if k == kind and fields.items() <= f.items()]
    assert len(found) == 1, f"{kind} {fields}: {len(found)} entries"
    return found[0]


def without(name: str, kind: str, /, **fields: Any) -> Callable[[Journals], None]:
    def change(journals: Journals) -> None:
        del journals[name][where(journals[name], kind, **fields)]

    return change


def again(name: str, kind: str, /, **fields: Any) -> Callable[[Journals], None]:
    def change(journals: Journals) -> None:
        at = where(journals[name], kind, **fields)
        journals[name].insert(at, journals[name][at])

    return change


def altered(name: str, kind: str, match: dict[str, Any], /, **fields: Any) -> Callable[[Journals], None]:
    def change(journals: Journals) -> None:
        at = where(journals[name], kind, **match)
        journals[name][at] = (kind, {**journals[name][at][1], **fields})

    return change


def added(name: str, kind: str, /, **fields: Any) -> Callable[[Journals], None]:
    """An entry more, before the last one, which may be the end."""

    def change(journals: Journals) -> None:
        journals[name].insert(len(journals[name]) - 1, (kind, fields))

    return change


def both(*changes: Callable[[Journals], None]) -> Callable[[Journals], None]:
    def change(journals: Journals) -> None:
        for one in changes:
            one(journals)

    return change


TRAINED = {"lineage": 0, "step": 1, "tokens_trained": 0, "tokens_context": 0}
VIOLATIONS: dict[str, tuple[Callable[[Journals], None], set[tuple[str, str]]]] = {
    "a lease that never ended": (
        without("allocator", "lease_ended", kind="failed"),
        {(LOST, "tree=2/lease=0.0")},
    ),
    "a lease that ended twice": (
        again("allocator", "lease_ended", kind="failed"),
        {(DUPLICATED, "tree=2/lease=0.0")},
    ),
    "a lease that was issued twice": (
        again("allocator", "lease_issued", tree=2),
        {(DUPLICATED, "tree=2/lease=0.0")},
    ),
    "a lease that ended and was never issued": (
        added("allocator", "lease_ended", **lease(2, 9, kind="failed", turns=0, reason="")),
        {(UNEXPLAINED, "tree=2/lease=9.0")},
    ),
    "a result that no actor has": (
        both(without("actor-0", "ended", tree=3), without("actor-0", "granted", tree=3)),
        {(UNEXPLAINED, "tree=3/lease=0.0")},
    ),
    "a result with another number of turns": (
        altered("actor-0", "ended", {"tree": 3}, turns=2),
        {(UNEXPLAINED, "tree=3/lease=0.0")},
    ),
    "a result of an actor without a journal": (
        altered("allocator", "lease_issued", {"tree": 2}, peer="actor-9/zz"),
        {(UNEXPLAINED, "actor=actor-9/zz")},
    ),
    "an actor's result for a lease that was never issued": (
        added("actor-0", "ended", **lease(4, 7, kind="finished", turns=1, discarded_tokens=0)),
        {(UNEXPLAINED, "tree=4/lease=7.0")},
    ),
    "an actor's result that the allocator took for a refusal": (
        both(altered("actor-0", "ended", {"tree": 2}, kind="finished"),
             altered("allocator", "lease_ended", {"tree": 2}, kind="declined")),
        {(UNEXPLAINED, "tree=2/lease=0.0")},
    ),
    "a grant that its actor never ended": (
        without("actor-0", "ended", tree=4),
        {(LOST, "tree=4/lease=0.0")},
    ),
    "a grant that its actor ended twice": (
        again("actor-0", "ended", tree=4),
        {(DUPLICATED, "tree=4/lease=0.0")},
    ),
    "a lease held by two actors": (
        added("actor-1", "granted", **lease(4, 0)),
        {(DUPLICATED, "tree=4/lease=0.0")},
    ),
    "a grant that was never issued": (
        added("actor-1", "granted", **lease(4, 8)),
        {(UNEXPLAINED, "tree=4/lease=8.0")},
    ),
    "an accepted turn that no actor sampled": (
        without("actor-0", "turn", tree=3),
        {(UNEXPLAINED, "tree=3/lease=0.0/turn=0")},
    ),
    "an accepted turn with other tokens than were sampled": (
        altered("actor-0", "turn", {"tree": 3}, tokens=4),
        {(UNEXPLAINED, "tree=3/lease=0.0/turn=0")},
    ),
    "a turn that was accepted twice": (
        again("allocator", "turn_accepted", tree=3),
        {(DUPLICATED, "tree=3/lease=0/turn=0")},
    ),
    "a turn that was taken back and never accepted": (
        altered("allocator", "turn_discarded", {}, offset=3),
        {(UNEXPLAINED, "tree=1/lease=1/turn=3")},
    ),
    "a turn of a finished continuation that was sampled and never accepted": (
        added("actor-0", "turn", **lease(3, 0, offset=5, tokens=3)),
        {(LOST, "tree=3/lease=0.0/turn=5")},
    ),
    "a finished continuation without one of its turns": (
        both(altered("allocator", "lease_ended", {"tree": 3}, turns=2),
             altered("actor-0", "ended", {"tree": 3}, turns=2)),
        {(LOST, "tree=3/lease=0.0")},
    ),
    "a tree with more tokens than were accepted": (
        both(altered("allocator", "tree_ready", {"tree": 1}, tokens=5),
             altered("learner", "received", {"tree": 1}, tokens=5)),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that arrived with other tokens than were sent": (
        altered("learner", "received", {"tree": 1}, tokens=5),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that was opened twice": (again("allocator", "tree_opened", tree=4), {(DUPLICATED, "tree=4")}),
    "a tree that was ready twice": (again("allocator", "tree_ready", tree=1), {(DUPLICATED, "tree=1")}),
    "a tree that was dropped twice": (again("allocator", "tree_dropped", tree=2), {(DUPLICATED, "tree=2")}),
    "a tree that was dropped and never opened": (
        added("allocator", "tree_dropped", tree=9, reason="x", tokens=0),
        {(UNEXPLAINED, "tree=9")},
    ),
    "a tree that vanished": (without("allocator", "tree_dropped", tree=2), {(LOST, "tree=2")}),
    "a tree that was dropped after it was ready, not by the learner": (
        both(without("learner", "dropped", tree=3), without("learner", "received", tree=3),
             without("allocator", "tree_delivered", tree=3)),
        {(DUPLICATED, "tree=3")},
    ),
    "a tree that was delivered and never ready": (
        both(added("allocator", "tree_delivered", tree=4), added("learner", "received", tree=4, tokens=0),
             altered("learner", "end", {}, queued=[4])),
        {(UNEXPLAINED, "tree=4")},
    ),
    "a tree that was received and never delivered": (
        without("allocator", "tree_delivered", tree=1),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that was delivered and never received": (
        both(added("allocator", "tree_opened", tree=5), added("allocator", "tree_ready", tree=5, tokens=0),
             added("allocator", "tree_delivered", tree=5), added("allocator", "tree_dropped", tree=5, reason="x", tokens=0),
             added("learner", "dropped", tree=5, reason="x", tokens=0)),
        {(LOST, "tree=5"), (UNEXPLAINED, "tree=5")},
    ),
    "a tree that was trained twice": (
        added("learner", "consumed", **{**TRAINED, "trees": [0]}),
        {(DUPLICATED, "tree=0")},
    ),
    "a tree that was trained and dropped": (
        added("learner", "dropped", tree=0, reason="stale", tokens=6),
        {(DUPLICATED, "tree=0")},
    ),
    "a tree that the learner forgot": (without("learner", "dropped", tree=3), {(LOST, "tree=3"), (DUPLICATED, "tree=3")}),
    "a tree that only the learner thinks was trained": (
        both(without("allocator", "tree_consumed", tree=1)),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that only the allocator thinks was trained": (
        added("allocator", "tree_consumed", tree=3, lineage=0, step=1),
        {(UNEXPLAINED, "tree=3")},
    ),
    "an update that no checkpoint holds": (
        both(without("learner", "committed", step=1),
             without("allocator", "tree_committed", tree=0), without("allocator", "tree_committed", tree=1),
             altered("allocator", "end", {}, in_flight_trees=[0, 1, 4])),
        {(LOST, "tree=0"), (LOST, "tree=1")},
    ),
    "a tree that was committed in no checkpoint": (
        both(added("allocator", "tree_committed", tree=4), altered("allocator", "end", {}, in_flight_trees=[])),
        {(UNEXPLAINED, "tree=4")},
    ),
    "a checkpoint that the allocator never heard of": (
        both(without("allocator", "tree_committed", tree=0), altered("allocator", "end", {}, in_flight_trees=[0, 4])),
        {(UNEXPLAINED, "tree=0")},
    ),
    "a bare count in flight that does not agree": (
        altered("allocator", "end", {}, in_flight_leases=0),
        {(LOST, "tree=4/lease=0.0")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
def test_exactly_the_violation_is_found_and_named(name: str, tmp_path: Path) -> None:
    change, expected = VIOLATIONS[name]
    journals = sound_run()
    change(journals)
    report = audit(tmp_path, journals)
    assert {(finding.kind, finding.id) for finding in report.findings} == expected, [*report.lines()]
    assert not report.ok


def test_every_law_is_broken_by_some_example(tmp_path: Path) -> None:
    from common.audit_books import read_books

    broken = set()
    for number, (change, _) in enumerate(VIOLATIONS.values()):
        journals = sound_run()
        change(journals)
        rundir = write(tmp_path / str(number), journals)
        actors = sorted((rundir.path / "actors").glob("*/journal.tw"))
        books = read_books(rundir.allocator_journal, actors, rundir.learner_journal)
        broken |= {law.__name__ for law in LAWS if list(law(books))}
    assert broken == {law.__name__ for law in LAWS}


# --------------------------------------------------------------------------- what is no violation


def cut(journals: Journals, name: str) -> None:
    assert journals[name].pop()[0] == "end"


def test_a_killed_allocator_leaves_its_open_leases_in_flight(tmp_path: Path) -> None:
    journals = sound_run()
    cut(journals, "allocator")
    without("allocator", "lease_ended", kind="failed")(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
    assert "did not end in order" in "\n".join(report.lines())


def test_a_killed_learner_leaves_what_it_had_not_trained(tmp_path: Path) -> None:
    journals = sound_run()
    cut(journals, "learner")
    without("learner", "dropped", tree=3)(journals)
    without("allocator", "tree_dropped", tree=3)(journals)
    altered("allocator", "end", {}, in_flight_trees=[3, 4])(journals)
    assert audit(tmp_path, journals).ok


def test_a_tree_trained_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    journals = sound_run()
    start = ("start", {"incarnation": "dd", "lineage": 1, "step": 0})
    lost_update = ("consumed", {**TRAINED, "trees": [0, 1]})
    journals["learner"][4:4] = [lost_update, start, ("received", {"tree": 0, "tokens": 6})]
    assert audit(tmp_path, journals).ok


def test_a_run_that_never_had_a_learner_can_be_audited(tmp_path: Path) -> None:
    journals = sound_run()
    del journals["learner"]
    for kind in ("tree_delivered", "tree_consumed", "tree_committed"):
        journals["allocator"] = [entry for entry in journals["allocator"] if entry[0] != kind]
    without("allocator", "tree_dropped", tree=3)(journals)
    altered("allocator", "end", {}, in_flight_trees=[0, 1, 3, 4])(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_journals_of_actors_elsewhere_are_found_where_they_are_named(tmp_path: Path) -> None:
    journals = sound_run()
    rundir = write(tmp_path, journals)
    elsewhere = tmp_path / "other" / "machine"
    elsewhere.parent.mkdir()
    (rundir.path / "actors" / "actor-0").rename(elsewhere)
    assert not audit_run(rundir).ok
    assert audit_run(rundir, [elsewhere]).ok
    with pytest.raises(StorageError, match=r"audit\.actor_dirs"):
        audit_run(rundir, [tmp_path])


# ----------------------------------------------------------------------------------- the role itself


def test_the_role_prints_a_table_and_ends_with_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_audit(Config(), write(tmp_path, sound_run())) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "audit: trees=5 leases=8 lost=0 duplicated=0 unexplained=0"
    )


def test_the_role_fails_and_names_some_of_the_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journals = sound_run()
    journals["allocator"][5:5] = [
        ("tree_opened", {"tree": tree, "task": "t", "wave": 1}) for tree in range(100, 130)
    ]
    assert run_audit(Config(audit=AuditConfig()), write(tmp_path, journals)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("lost: tree=") for line in lines) == 10
    assert "lost: and 20 more" in lines
    assert lines[-1] == "audit: trees=35 leases=8 lost=30 duplicated=0 unexplained=0"


def test_a_run_without_an_allocator_journal_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nothing to audit"):
        audit_run(RunDir.create(tmp_path, "run"))
