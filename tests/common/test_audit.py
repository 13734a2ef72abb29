"""The audit of a run directory: its table, its last line, its exit code."""

from pathlib import Path

import pytest

from common.audit import audit_run, run_audit
from common.config import AuditConfig, Config
from common.errors import StorageError
from common.rundir import RunDir
from tests.common.audit_journals import altered, audit, sound_run, write


def test_a_sound_run_has_nothing_lost_duplicated_or_unexplained(tmp_path: Path) -> None:
    report = audit(tmp_path, sound_run())
    assert report.findings == []
    assert report.last_line() == "audit: trees=5 leases=8 lost=0 duplicated=0 unexplained=0"
    rows = dict(report.rows)
    assert rows["tokens sampled"] == "25 = 15 accepted + 3 crossed + 7 discarded"
    assert rows["tokens accepted"] == "15 = 12 ready + 0 dropped + 3 taken back + 0 in flight"
    assert rows["tokens at the learner"] == "5 trained, 1 without contrast, 3 context, 3 dropped, 0 abandoned"
    assert "1 no_outcome, 1 stale" in "\n".join(report.lines())


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


def test_journals_of_actors_elsewhere_are_found_where_they_are_named(tmp_path: Path) -> None:
    rundir = write(tmp_path, sound_run())
    elsewhere = tmp_path / "other" / "machine"
    elsewhere.parent.mkdir()
    (rundir.path / "actors" / "actor-0").rename(elsewhere)
    assert not audit_run(rundir).ok
    assert audit_run(rundir, [elsewhere]).ok
    with pytest.raises(StorageError, match=r"audit\.actor_dirs"):
        audit_run(rundir, [tmp_path])


def test_trees_on_the_wire_at_the_end_are_shown(tmp_path: Path) -> None:
    journals = sound_run()
    altered("allocator", "end", {}, on_the_wire_trees=[4])(journals)
    assert dict(audit(tmp_path, journals).rows)["trees on the wire"] == "1 when the allocator ended"
