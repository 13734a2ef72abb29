"""`role=audit`: is any tree, lease, turn or token of a run unaccounted for?

    journals ──▶ audit_books (read) ──▶ audit_laws, audit_tree_laws (compare by id)
                                                   └──▶ AuditReport ──▶ table and last line

The answer comes from comparing the id sets of three independent journals, not from subtracting counters, so
it names the ids. The last line is `audit: trees=… leases=… lost=… duplicated=… unexplained=…`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common.audit_books import AllocatorBook, Books, LearnerBook, read_books
from common.audit_findings import DUPLICATED, LOST, UNEXPLAINED, Finding
from common.audit_laws import LAWS
from common.config import Config
from common.errors import StorageError
from common.rundir import RunDir

SHOWN = 10
"""Findings of each kind that are printed: the first ones tell what is wrong."""


@dataclass(slots=True)
class AuditReport:
    """What the journals say. `rows` are (label, value) for the table."""

    trees: int
    leases: int
    findings: list[Finding]
    rows: list[tuple[str, str]] = field(default_factory=list)
    given_up: int = 0
    """Continuations that ended without an outcome after their last attempt failed."""

    @property
    def ok(self) -> bool:
        return not self.findings

    def count(self, kind: str) -> int:
        return sum(finding.kind == kind for finding in self.findings)

    def last_line(self) -> str:
        kinds = " ".join(f"{kind}={self.count(kind)}" for kind in (LOST, DUPLICATED, UNEXPLAINED))
        return f"audit: trees={self.trees} leases={self.leases} {kinds}"

    def lines(self) -> Iterator[str]:
        """The table, then the findings, at most `SHOWN` of each kind."""
        for label, value in self.rows:
            yield f"  {label:<28}{value}"
        for kind in (LOST, DUPLICATED, UNEXPLAINED):
            found = [finding for finding in self.findings if finding.kind == kind]
            for finding in found[:SHOWN]:
                yield f"{kind}: {finding.id}: {finding.what}"
            if len(found) > SHOWN:
                yield f"{kind}: and {len(found) - SHOWN} more"


def audit_run(rundir: RunDir, extra_actor_dirs: Iterable[Path] = ()) -> AuditReport:
    """Compare the journals of a run.

    Args:
        rundir: actors that role=local started have their journals below its `actors/`.
        extra_actor_dirs: directories of actors that ran elsewhere; each has a `journal.tw`.

    Raises:
        StorageError: a journal is damaged, the allocator's is missing, or a named directory has none.
    """
    actors = sorted((rundir.path / "actors").glob("*/journal.tw"))
    for folder in extra_actor_dirs:
        if not (folder / "journal.tw").is_file():
            raise StorageError(
                f"audit.actor_dirs must name directories of actors, got {folder} without a journal.tw"
            )
        actors.append(folder / "journal.tw")
    return audit_books(read_books(rundir.allocator_journal, actors, rundir.learner_journal))


def audit_books(books: Books) -> AuditReport:
    """Hold every law over the journals."""
    findings = [finding for law in LAWS for finding in law(books)]
    book = books.allocator
    given_up = sum(end.kind == "dropped" for ends in book.ended.values() for end in ends)
    return AuditReport(len(book.opened), len(book.issued), findings, list(_rows(books)), given_up)


def run_audit(config: Config, rundir: RunDir) -> int:
    """Print the report; 0 if nothing is lost, duplicated or unexplained, else 1. Raises `StorageError`."""
    report = audit_run(rundir, [Path(folder) for folder in config.audit.actor_dirs])
    for line in report.lines():
        print(line)
    print(report.last_line(), flush=True)
    return 0 if report.ok else 1


def _rows(books: Books) -> Iterator[tuple[str, str]]:
    book, learner = books.allocator, books.learner
    yield (
        "trees at the allocator",
        f"{len(book.opened)} opened, {len(book.ready)} ready, {len(book.delivered)} delivered, "
        f"{len(book.committed)} committed, {len(book.dropped)} dropped",
    )
    yield (
        "trees at the learner",
        f"{len(learner.received)} received, {len(learner.trained)} trained, {len(learner.dropped)} dropped, "
        f"{len(learner.abandoned)} in an abandoned lineage",
    )
    yield "leases", _counts(Counter(ends[0].kind for ends in book.ended.values())) or "none ended"
    yield "actor journals", f"{len(books.actors)}, holding {sum(len(a.granted) for a in books.actors)} grants"
    reasons = Counter(reason for ends in book.dropped.values() for reason, _ in ends)
    if reasons:
        yield "trees dropped", _counts(reasons)
    yield "tokens sampled", _sampled(books)
    yield "tokens accepted", _accepted(book)
    yield "tokens at the learner", _learner_tokens(learner)
    if book.on_the_wire:
        yield "trees on the wire", f"{len(book.on_the_wire)} when the allocator ended"
    if book.recoveries:
        longest = max(book.recoveries)
        yield "allocator restarts", f"{len(book.recoveries)}, its books back within {longest:.2f} s"
    for name, closed in (("allocator", book.closed), ("learner", learner.closed or not learner.present)):
        if not closed:
            yield name, "did not end in order: what it held counts as in flight"


def _sampled(books: Books) -> str:
    """All that actors generated, by their journals; a turn that a killed one was at is in none."""
    reported = sum(actor.tokens_reported for actor in books.actors)
    discarded = sum(actor.tokens_discarded for actor in books.actors)
    taken = books.allocator.turns
    crossed = sum(
        sum(turns) for actor in books.actors for key, turns in actor.turns.items() if key not in taken
    )
    accepted = books.allocator.tokens_accepted
    return f"{reported + discarded} = {accepted} accepted + {crossed} crossed + {discarded} discarded"


def _accepted(book: AllocatorBook) -> str:
    accepted, again = book.tokens_accepted, sum(book.discarded.values())
    ready = sum(tokens[0] for tokens in book.ready.values())
    dropped = sum(ends[0][1] for tree, ends in book.dropped.items() if tree not in book.ready)
    in_flight = accepted - ready - dropped - again
    return f"{accepted} = {ready} ready + {dropped} dropped + {again} taken back + {in_flight} in flight"


def _learner_tokens(learner: LearnerBook) -> str:
    batches = learner.batches
    parts = {
        "trained": sum(batch.trained for batch in batches),
        "without contrast": sum(batch.no_contrast for batch in batches),
        "context": sum(batch.context for batch in batches),
        "dropped": learner.tokens_dropped,
        "abandoned": sum(batch.tokens for batch in learner.abandoned_batches),
    }
    return ", ".join(f"{count} {name}" for name, count in parts.items())


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))
