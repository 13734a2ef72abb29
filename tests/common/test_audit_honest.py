"""Kills, restarts and crossings that an audit must not take for a loss."""

from pathlib import Path

import pytest

from common.audit_laws import GIVEN_UP_UNHEARD, TAKEN
from tests.common.audit_journals import (
    Entry,
    Journals,
    added,
    altered,
    audit,
    inserted,
    lease,
    sound_run,
    start,
    update,
    without,
)


def cut(journals: Journals, name: str) -> None:
    assert journals[name].pop()[0] == "end"


def received(tree: int, tokens: int) -> Entry:
    return "received", {"tree": tree, "tokens": tokens}


# ---------------------------------------------------------------------------------------- leases


def test_a_killed_allocator_leaves_its_open_leases_in_flight(tmp_path: Path) -> None:
    journals = sound_run()
    cut(journals, "allocator")
    without("allocator", "lease_ended", kind="failed")(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
    assert "did not end in order" in "\n".join(report.lines())


def test_an_allocator_that_goes_on_where_another_died_is_one_run(tmp_path: Path) -> None:
    """What the dead one had out was fenced; the new one ends in order, and it is its word that counts."""
    journals = sound_run()
    recovered = {"boot": 1, "seconds": 0.25, "inputs": 9, "now": 1.0}
    began = [("start", {"boot": 1}), ("recovered", recovered)]
    journals["allocator"][-1:-1] = began
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
    assert dict(report.rows)["allocator restarts"] == "1, its books back within 0.25 s"


def test_the_end_of_a_run_that_was_taken_up_again_is_none(tmp_path: Path) -> None:
    """An orderly end, then another start that was killed: what it held is in flight."""
    journals = sound_run()
    journals["allocator"] += [
        ("start", {"boot": 1}),
        ("tree_opened", {"tree": 9, "task": "t", "wave": 0}),
        ("lease_issued", lease(9, 0, 1_000_000, peer="actor-0/aa")),
    ]
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
    assert "did not end in order" in "\n".join(report.lines())


def test_a_lease_that_no_process_of_the_allocator_ended_is_lost(tmp_path: Path) -> None:
    journals = sound_run()
    end = journals["allocator"].pop()
    journals["allocator"] += [
        ("lease_issued", lease(4, 7, 0, peer="actor-0/aa")),
        ("start", {"boot": 1}),
        end,
    ]
    (finding,) = audit(tmp_path, journals).findings
    assert finding.id == "tree=4/lease=7.0" and finding.kind == "lost"


@pytest.mark.parametrize(
    "kind, reason", [*((kind, "") for kind in TAKEN), *(("dropped", reason) for reason in GIVEN_UP_UNHEARD)]
)
def test_a_result_may_cross_an_end_that_is_the_allocators_alone(
    kind: str, reason: str, tmp_path: Path
) -> None:
    journals = sound_run()
    altered("allocator", "lease_ended", {"tree": 1, "number": 1, "epoch": 1}, kind=kind, reason=reason)(
        journals
    )
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_turn_whose_connection_was_lost_may_come_after_the_failure_behind_it(tmp_path: Path) -> None:
    journals = sound_run()
    added("actor-0", "turn", **lease(2, 0, offset=0, tokens=3))(journals)
    assert audit(tmp_path, journals).ok


# ----------------------------------------------------------------------------------------- trees


def test_a_killed_learner_leaves_what_it_had_not_trained(tmp_path: Path) -> None:
    journals = sound_run()
    cut(journals, "learner")
    without("learner", "dropped", tree=3)(journals)
    without("allocator", "tree_dropped", tree=3)(journals)
    altered("allocator", "end", {}, in_flight_trees=[3, 4])(journals)
    assert audit(tmp_path, journals).ok


def test_a_tree_trained_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    journals = sound_run()
    again = [received(tree, tokens) for tree, tokens in ((0, 6), (1, 3), (3, 3))]
    journals["learner"][4:4] = [update([0, 1], 1, trained=9), start("cc", 1, 0), *again]
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
    assert (
        dict(report.rows)["tokens at the learner"]
        == "5 trained, 1 without contrast, 3 context, 3 dropped, 9 abandoned"
    )


def test_a_learner_may_fall_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    """The trees of the lost one are dropped by the allocator, which had them as committed."""
    journals = sound_run()
    for tree in (0, 1):
        added("allocator", "tree_dropped", tree=tree, reason="checkpoint_lost", tokens=0)(journals)
    inserted("learner", -1, start("cc", 1, 0))(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_drop_whose_word_died_with_its_learner_may_be_followed_by_training(tmp_path: Path) -> None:
    journals = sound_run()
    without("allocator", "tree_dropped", tree=3)(journals)
    for kind, fields in (
        ("tree_delivered", {}),
        ("tree_consumed", {"lineage": 1, "step": 2}),
        ("tree_committed", {}),
    ):
        added("allocator", kind, tree=3, **fields)(journals)
    inserted(
        "learner",
        -1,
        start("cc", 1, 1),
        received(3, 3),
        update([3], 2, trained=3, lineage=1),
        ("committed", {"lineage": 1, "step": 2}),
    )(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_an_update_whose_word_died_with_its_learner_is_committed_when_the_trees_come_again(
    tmp_path: Path,
) -> None:
    journals = sound_run()
    for tree in (0, 1):
        without("allocator", "tree_consumed", tree=tree)(journals)
    inserted("learner", -1, start("cc", 1, 1))(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_checkpoint_counts_though_its_writer_died_before_it_said_so(tmp_path: Path) -> None:
    journals = sound_run()
    without("learner", "committed", step=1)(journals)
    inserted("learner", -1, start("cc", 1, 1))(journals)
    assert audit(tmp_path, journals).ok


def test_what_a_dead_learner_held_may_wait_at_the_allocator_for_the_next_one(tmp_path: Path) -> None:
    journals = sound_run()
    without("learner", "dropped", tree=3)(journals)
    without("allocator", "tree_dropped", tree=3)(journals)
    altered("allocator", "end", {}, in_flight_trees=[3, 4])(journals)
    inserted("learner", -1, start("cc", 1, 1))(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_an_allocator_that_ended_first_does_not_hear_of_the_last_update(tmp_path: Path) -> None:
    journals = sound_run()
    for kind in ("tree_consumed", "tree_committed"):
        for tree in (0, 1):
            without("allocator", kind, tree=tree)(journals)
    without("allocator", "input", peer="learner/cc")(journals)
    altered("allocator", "end", {}, in_flight_trees=[0, 1, 4])(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_delivered_tree_may_be_on_the_wire_when_the_run_ends(tmp_path: Path) -> None:
    journals = sound_run()
    added("allocator", "tree_ready", tree=4, tokens=0)(journals)
    added("allocator", "tree_delivered", tree=4)(journals)
    altered("allocator", "end", {}, on_the_wire_trees=[4])(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_tree_too_large_to_send_is_the_allocators_to_drop(tmp_path: Path) -> None:
    journals = sound_run()
    altered("allocator", "end", {}, in_flight_trees=[])(journals)
    added("allocator", "tree_ready", tree=4, tokens=0)(journals)
    added("allocator", "tree_delivered", tree=4)(journals)
    added("allocator", "tree_dropped", tree=4, reason="too large to send", tokens=0)(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]


def test_a_run_that_never_had_a_learner_can_be_audited(tmp_path: Path) -> None:
    journals = sound_run()
    del journals["learner"]
    for kind in ("tree_delivered", "tree_consumed", "tree_committed"):
        journals["allocator"] = [entry for entry in journals["allocator"] if entry[0] != kind]
    without("allocator", "tree_dropped", tree=3)(journals)
    altered("allocator", "end", {}, in_flight_trees=[0, 1, 3, 4])(journals)
    report = audit(tmp_path, journals)
    assert report.ok, [*report.lines()]
