import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.lease_table import Granted, LeaseTable
from common.nouns import Lease, LeaseId, TaskId, Version

V0, V1 = Version(0, 0), Version(0, 1)


def lease(number: int, epoch: int = 0, min_version: Version = V0, tree: int = 0) -> Lease:
    return Lease(
        id=LeaseId(tree, number, epoch),
        task=TaskId("frozenlake", "train", 0),
        anchor=0,
        prefix=b"",
        snapshot=None,
        history=[],
        state_hash="",
        depth=0,
        offset=0,
        seed=0,
        horizon=0,
        score_stamp=0,
        weight=1.0,
        baseline=None,
        predictor_version=0,
        min_version=min_version,
        deadline_s=10.0,
    )


def started(table: LeaseTable, held: Version | None = V0) -> list[int]:
    return [attempt.lease.id.number for attempt in table.start(held)]


def test_leases_start_in_the_order_of_their_grants_up_to_the_slots() -> None:
    table = LeaseTable(slots=2, prefetch=2)
    assert [table.grant(lease(n), 0.0) for n in (3, 1, 2)] == [Granted.QUEUED] * 3
    assert started(table) == [3, 1]
    assert started(table) == []
    table.end(LeaseId(0, 3, 0))
    assert started(table) == [2]
    assert (table.running, table.queued) == (2, 0)


def test_a_resent_grant_is_ignored_while_queued_while_running_and_after_the_end() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0), 0.0)
    assert table.grant(lease(0), 0.0) is Granted.KNOWN
    assert started(table) == [0]
    assert table.grant(lease(0), 0.0) is Granted.KNOWN
    table.end(LeaseId(0, 0, 0))
    assert table.grant(lease(0), 0.0) is Granted.KNOWN
    assert started(table) == [] and len(table) == 0


def test_an_older_epoch_is_ignored_and_a_newer_one_stops_the_attempt_that_runs() -> None:
    table = LeaseTable(slots=2, prefetch=2)
    table.grant(lease(0, epoch=1), 0.0)
    assert table.grant(lease(0, epoch=0), 0.0) is Granted.OUTDATED
    (old,) = table.start(V0)
    assert table.grant(lease(0, epoch=2), 0.0) is Granted.QUEUED
    assert old.stop_reason and not old.stop_retry
    assert table.running == 1, "the old attempt holds its slot until it has stopped"
    (new,) = table.start(V0)
    assert (new.lease.id.epoch, table.running) == (2, 2)
    table.end(old.lease.id)
    assert table.running == 1 and not new.stop_reason


def test_a_newer_epoch_replaces_a_queued_attempt() -> None:
    table = LeaseTable(slots=1, prefetch=3)
    table.grant(lease(0), 0.0)
    table.grant(lease(0, epoch=1), 0.0)
    assert [attempt.lease.id.epoch for attempt in table.start(V0)] == [1]
    assert len(table) == 1
    assert [(attempt.lease.id.epoch, attempt.started) for attempt in table.fenced()] == [(0, False)]
    assert table.fenced() == []


def test_a_lease_waits_for_the_weights_it_needs_and_holds_up_no_other() -> None:
    table = LeaseTable(slots=4, prefetch=0)
    table.grant(lease(0, min_version=V1), 0.0)
    table.grant(lease(1), 0.0)
    assert started(table, held=None) == []
    assert started(table, held=V0) == [1]
    assert started(table, held=V1) == [0]


def test_a_newer_lineage_serves_a_lease_that_names_an_older_one() -> None:
    table = LeaseTable(slots=1, prefetch=0)
    table.grant(lease(0, min_version=Version(0, 7)), 0.0)
    assert started(table, held=Version(1, 3)) == [0]


def test_leases_that_wait_too_long_for_weights_are_taken_out_and_others_are_not() -> None:
    table = LeaseTable(slots=1, prefetch=4)
    table.grant(lease(0, min_version=V1), 0.0)
    table.grant(lease(1, min_version=V1), 5.0)
    table.grant(lease(2), 0.0)
    taken = table.waiting_for_weights(V0, now=8.5, share=0.8)
    assert [attempt.lease.id.number for attempt in taken] == [0]
    assert table.queued == 2


def test_one_lease_too_many_is_refused_and_a_resend_of_it_stays_refused() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0), 0.0)
    table.grant(lease(1), 0.0)
    assert table.grant(lease(2), 0.0) is Granted.NO_ROOM
    assert table.grant(lease(2), 0.0) is Granted.KNOWN
    assert table.grant(lease(2, epoch=1), 0.0) is Granted.NO_ROOM


def test_revoking_a_queued_lease_takes_it_out() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0), 0.0)
    revoked = table.revoke(LeaseId(0, 0, 0), "too old")
    assert revoked is not None and not revoked.started and revoked.stop_reason == "too old"
    assert started(table) == [] and len(table) == 0


def test_revoking_a_running_lease_tells_it_and_the_first_reason_stays() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0), 0.0)
    (attempt,) = table.start(V0)
    assert table.revoke(attempt.lease.id, "too old") is attempt
    table.revoke(attempt.lease.id, "again")
    assert attempt.stop_reason == "too old" and table.running == 1


def test_a_revoke_that_overtakes_its_grant_keeps_the_lease_from_starting() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    assert table.revoke(LeaseId(0, 0, 0), "too old") is None
    assert table.grant(lease(0), 0.0) is Granted.KNOWN


def test_a_revoke_of_an_older_epoch_leaves_the_newer_attempt_alone() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0, epoch=1), 0.0)
    assert table.revoke(LeaseId(0, 0, 0), "too old") is None
    assert started(table) == [0]


def test_ending_twice_or_ending_an_older_attempt_frees_no_slot_of_another() -> None:
    table = LeaseTable(slots=1, prefetch=1)
    table.grant(lease(0, epoch=1), 0.0)
    table.start(V0)
    table.end(LeaseId(0, 0, 0))
    assert table.running == 1
    table.end(LeaseId(0, 0, 1))
    table.end(LeaseId(0, 0, 1))
    assert table.running == 0


def test_a_drain_returns_what_waits_and_tells_what_runs() -> None:
    table = LeaseTable(slots=1, prefetch=2)
    for number in range(3):
        table.grant(lease(number), 0.0)
    (attempt,) = table.start(V0)
    assert [waiting.lease.id.number for waiting in table.drain("run ended", retry=False)] == [1, 2]
    assert attempt.stop_reason == "run ended" and table.queued == 0


def test_old_leases_are_forgotten_so_that_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.lease_table.REMEMBERED", 3)
    table = LeaseTable(slots=1, prefetch=0)
    for number in range(10):
        table.grant(lease(number), 0.0)
        table.start(V0)
        table.end(LeaseId(0, number, 0))
    assert table.grant(lease(9), 0.0) is Granted.KNOWN
    assert table.grant(lease(0), 0.0) is Granted.QUEUED


ops = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("revoke"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("start"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
    ),
    max_size=60,
)


@given(ops)
def test_whatever_comes_no_attempt_starts_twice_and_no_slot_is_lost_or_given_twice(
    steps: list[tuple[str, int, int]],
) -> None:
    table = LeaseTable(slots=2, prefetch=2)
    newest: dict[int, int] = {}
    granted: list[LeaseId] = []
    ever: list[LeaseId] = []
    live: list[LeaseId] = []
    ended: list[LeaseId] = []
    for name, number, epoch in steps:
        if name == "grant":
            offered = lease(number, epoch, min_version=V1 if number == 3 else V0)
            answer = table.grant(offered, 0.0)
            assert (answer in (Granted.QUEUED, Granted.NO_ROOM)) == (epoch > newest.get(number, -1))
            granted += [offered.id] if answer is Granted.QUEUED else []
            newest[number] = max(epoch, newest.get(number, -1))
        elif name == "revoke":
            revoked = table.revoke(LeaseId(0, number, epoch), "because")
            assert revoked is None or revoked.stop_reason
            ended += [revoked.lease.id] if revoked is not None and not revoked.started else []
            newest[number] = max(epoch, newest.get(number, -1))
        elif name == "start":
            held = V1 if number else V0
            for attempt in table.start(held):
                assert attempt.lease.min_version <= held and not attempt.stop_reason
                assert attempt.lease.id not in ever
                assert attempt.lease.id.epoch == newest[attempt.lease.id.number]
                ever.append(attempt.lease.id)
                live.append(attempt.lease.id)
        elif live:
            over = live.pop(number % len(live))
            ended.append(over)
            table.end(over)
        ended += [attempt.lease.id for attempt in table.fenced()]
        assert table.running == len(live) <= 2 and len(table) <= 4
        assert sorted(map(str, (attempt.lease.id for attempt in table.attempts))) == sorted(map(str, live))
        outdated = [at for at in table.attempts if at.lease.id.epoch < newest[at.lease.id.number]]
        assert all(attempt.stop_reason for attempt in outdated), "an outdated attempt goes on"
    for attempt in table.drain("run ended", retry=False):
        ended.append(attempt.lease.id)
    assert sorted(map(str, granted)) == sorted(map(str, ended + live)), "every lease ends exactly once"
