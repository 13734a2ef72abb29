"""For each law of the audit, copies of a sound run with exactly that law broken."""

from pathlib import Path

import pytest

from common.audit_books import read_books
from common.audit_findings import DUPLICATED, LOST, UNEXPLAINED
from common.audit_laws import LAWS
from tests.common.audit_journals import (
    Change,
    Entry,
    added,
    again,
    altered,
    audit,
    both,
    inserted,
    lease,
    sound_run,
    start,
    update,
    without,
    write,
)

AGAIN: list[Entry] = [
    ("received", {"tree": tree, "tokens": tokens}) for tree, tokens in ((0, 6), (1, 3), (3, 3))
]
VIOLATIONS: dict[str, tuple[Change, set[tuple[str, str]]]] = {
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
    **{
        f"an actor's result of a lease that {kind} at the allocator ({reason})": (
            altered("allocator", "lease_ended", {"tree": 3}, kind=kind, reason=reason),
            {(UNEXPLAINED, "tree=3/lease=0.0")},
        )
        for kind in ("failed", "dropped")
        for reason in ("", "the engine is dead")
    },
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
    "a turn that is twice in the journal of its actor": (
        again("actor-0", "turn", tree=3),
        {(DUPLICATED, "tree=3/lease=0.0/turn=0")},
    ),
    "a turn of a lease that was never issued": (
        added("actor-0", "turn", **lease(3, 9, offset=0, tokens=3)),
        {(UNEXPLAINED, "tree=3/lease=9.0/turn=0")},
    ),
    "a turn of a lease that was given back unstarted": (
        both(altered("allocator", "lease_ended", {"tree": 2}, kind="declined"),
             added("actor-0", "turn", **lease(2, 0, offset=0, tokens=3))),
        {(UNEXPLAINED, "tree=2/lease=0.0/turn=0")},
    ),
    "a crossed turn with other tokens than were sampled": (
        altered("actor-0", "turn", {"tree": 1, "number": 1, "epoch": 1}, tokens=4),
        {(UNEXPLAINED, "tree=1/lease=1.1/turn=0")},
    ),
    "a crossed turn that no actor sampled": (
        without("actor-0", "turn", tree=1, number=1, epoch=1),
        {(UNEXPLAINED, "tree=1/lease=1.1/turn=0")},
    ),
    "discarded tokens that the actor did not write down": (
        altered("actor-0", "ended", {"tree": 2}, discarded_tokens=4),
        {(UNEXPLAINED, "tree=2/lease=0.0")},
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
             altered("learner", "received", {"tree": 1}, tokens=5), altered("learner", "consumed", {}, tokens_context=5)),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that arrived with other tokens than were sent": (
        both(altered("learner", "received", {"tree": 1}, tokens=5), altered("learner", "consumed", {}, tokens_context=5)),
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
    "a tree that was delivered, and is in flight but on no wire, though nobody received it": (
        both(added("allocator", "tree_ready", tree=4, tokens=0), added("allocator", "tree_delivered", tree=4)),
        {(LOST, "tree=4")},
    ),
    "a tree that a learner that died had received, and that came to nobody after it": (
        both(added("allocator", "tree_opened", tree=5), added("allocator", "tree_ready", tree=5, tokens=0),
             added("allocator", "tree_delivered", tree=5), added("allocator", "tree_dropped", tree=5, reason="x", tokens=0),
             inserted("learner", 1, ("received", {"tree": 5, "tokens": 0}), start("cc", 1, 0))),
        {(LOST, "tree=5"), (DUPLICATED, "tree=5")},
    ),
    "a committed tree that went with its checkpoint and was kept by the allocator": (
        inserted("learner", -1, start("cc", 1, 0), ("received", {"tree": 1, "tokens": 3}),
                 update([1], 1, trained=3, lineage=1), ("committed", {"lineage": 1, "step": 1})),
        {(LOST, "tree=0"), (UNEXPLAINED, "tree=0")},
    ),
    "a tree that was lost with a checkpoint from which no learner fell back": (
        added("allocator", "tree_dropped", tree=1, reason="checkpoint_lost", tokens=0),
        {(DUPLICATED, "tree=1"), (UNEXPLAINED, "tree=1")},
    ),
    "an update of which the allocator heard nothing, though it heard the goodbye after it": (
        both(without("allocator", "tree_consumed", tree=1), without("allocator", "tree_committed", tree=1),
             altered("allocator", "end", {}, in_flight_trees=[1, 4])),
        {(UNEXPLAINED, "tree=1")},
    ),
    "a tree that was trained twice": (
        inserted("learner", -1, update([0], 1, trained=6)),
        {(DUPLICATED, "tree=0")},
    ),
    "a batch with more tokens than it says became of them": (
        altered("learner", "consumed", {}, tokens_trained=1, tokens_no_contrast=0, tokens_context=0),
        {(UNEXPLAINED, "update=0.1")},
    ),
    "a batch of an abandoned lineage with other tokens than its trees": (
        inserted("learner", 4, update([0, 1], 1, trained=8), start("cc", 1, 0), *AGAIN),
        {(UNEXPLAINED, "update=0.1")},
    ),
    "a tree that was dropped with other tokens than it came with": (
        altered("learner", "dropped", {}, tokens=2),
        {(UNEXPLAINED, "tree=3")},
    ),
    "a tree that the learner dropped twice": (again("learner", "dropped", tree=3), {(DUPLICATED, "tree=3")}),
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
    broken = set()
    for number, (change, _) in enumerate(VIOLATIONS.values()):
        journals = sound_run()
        change(journals)
        rundir = write(tmp_path / str(number), journals)
        actors = sorted((rundir.path / "actors").glob("*/journal.tw"))
        books = read_books(rundir.allocator_journal, actors, rundir.learner_journal)
        broken |= {law.__name__ for law in LAWS if list(law(books))}
    assert broken == {law.__name__ for law in LAWS}
