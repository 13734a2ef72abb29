import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.foreman import Foreman
from actors.lease_table import LeaseTable
from actors.ledger import FILE_NAME, Ledger
from common.errors import EngineError
from common.journal import read_journal
from common.messages import (
    Declined,
    Expanded,
    Failed,
    Finished,
    Grant,
    Inspect,
    Inspected,
    InspectFailed,
    Message,
    Revoke,
    Starting,
)
from common.nouns import Lease, LeaseId, TaskId, Version
from tests.actors.fakes import LAKE, TOKENIZER, FakeEngine, make_tools, random_walk, root_lease
from tests.actors.ring import in_a_loop
from tests.actors.servers import until

V0 = Version(0, 0)


def lease(number: int, **changes: Any) -> Lease:
    return root_lease(LAKE, TOKENIZER, number=number, index=number, **changes)


class Shop:
    """A foreman whose messages and failures are collected."""

    def __init__(self, folder: Path, slots: int = 4, prefetch: int = 4) -> None:
        self.sent: list[Message] = []
        self.errors: list[BaseException] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.engine = FakeEngine(random_walk(TOKENIZER))
        self.ledger = Ledger(folder)
        self.path = folder / FILE_NAME
        self.foreman = Foreman(LeaseTable(slots, prefetch), self.ledger, self.sent.append, self.spawn)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.over)

    def over(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if (error := task.exception()) is not None:
            self.errors.append(error)

    def equip(self) -> None:
        self.foreman.equip(make_tools(self.engine, LAKE))

    def grant(self, *leases: Lease, version: Version = V0) -> None:
        self.foreman.on_grant(Grant(list(leases), version))

    async def quiet(self) -> None:
        await until(lambda: not self.tasks, what="all tasks to end")

    async def asked(self) -> None:
        await until(lambda: bool(self.engine.requests), what="a request to the engine")

    def answer(self) -> None:
        """The engine answers from now on."""
        assert self.engine.hold is not None
        self.engine.hold.set()

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def journal(self) -> list[tuple[str, dict[str, Any]]]:
        self.ledger.flush()
        return [(record.kind, record.fields) for record in read_journal(self.path)]

    def ends(self) -> dict[tuple[int, int], list[str]]:
        """(number, epoch) -> kinds of its `ended` records, for every lease that was granted."""
        found: dict[tuple[int, int], list[str]] = {}
        for kind, record in self.journal():
            if kind == "granted":
                found.setdefault((record["number"], record["epoch"]), [])
            elif kind == "ended":
                found[record["number"], record["epoch"]].append(record["kind"])
        return found


def ready(folder: Path, **sizes: int) -> Shop:
    """A shop that has its weights."""
    shop = Shop(folder, **sizes)
    shop.equip()
    return shop


def held(folder: Path, **sizes: int) -> Shop:
    """The same; its engine answers only to aborts, until it is told to."""
    shop = ready(folder, **sizes)
    shop.engine.hold = asyncio.Event()
    return shop


@in_a_loop
async def test_many_leases_run_at_once_within_the_slots_and_all_of_them_end(tmp_path: Path) -> None:
    shop = ready(tmp_path, slots=5, prefetch=40)
    shop.grant(*(lease(number) for number in range(40)))
    seen = 0
    while shop.tasks:
        seen = max(seen, shop.foreman.table.running)
        await asyncio.sleep(0)
    assert seen == 5
    assert sorted(m.lease.number for m in shop.of(Finished)) == list(range(40))
    assert shop.ends() == {(number, 0): ["finished"] for number in range(40)}
    assert not shop.errors


@in_a_loop
async def test_the_journal_says_what_was_sent_turn_by_turn(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    shop.grant(lease(0))
    await shop.quiet()
    journal = shop.journal()
    assert [kind for kind, _ in journal][:2] == ["granted", "starting"]
    turns = [(record["offset"], record["tokens"]) for kind, record in journal if kind == "turn"]
    assert turns == [(m.offset, m.turn.num_action_tokens) for m in shop.of(Expanded)]
    kind, record = journal[-1]
    assert (kind, record["turns"], record["discarded_tokens"]) == ("ended", len(turns), 0)


@in_a_loop
async def test_grants_and_inspections_wait_for_the_first_weights(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    task = TaskId("frozenlake", "train", 3)
    shop.grant(lease(0))
    for _ in range(2):
        shop.foreman.on_inspect(Inspect(7, task))
    await asyncio.sleep(0.01)
    assert shop.sent == []
    shop.equip()
    await shop.quiet()
    assert [message.tree for message in shop.of(Inspected)] == [7]
    assert len(shop.of(Finished)) == 1
    shop.foreman.on_inspect(Inspect(7, task))
    await shop.quiet()
    assert len(shop.of(Inspected)) == 2, "a repeat after the answer is answered again"


@in_a_loop
async def test_a_lease_waits_for_the_weights_it_needs_and_starts_when_they_come(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    shop.grant(lease(0, min_version=Version(0, 1)))
    await asyncio.sleep(0.01)
    assert shop.sent == []
    shop.engine.version = Version(0, 1)
    shop.foreman.schedule()
    await shop.quiet()
    assert shop.of(Starting) == [Starting(LeaseId(0, 0, 0), Version(0, 1))]


@in_a_loop
async def test_a_lease_whose_weights_do_not_come_is_given_back_before_its_deadline(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    shop.grant(lease(0, min_version=Version(0, 1), deadline_s=0.05))
    shop.foreman.tick(0.5)
    assert shop.sent == []
    await asyncio.sleep(0.05)
    shop.foreman.tick(0.5)
    (declined,) = shop.of(Declined)
    assert declined.reason == "weights v0.1 have not arrived, this actor holds v0.0"
    assert shop.ends() == {(0, 0): ["declined"]}


@in_a_loop
async def test_one_lease_too_many_is_declined(tmp_path: Path) -> None:
    shop = Shop(tmp_path, slots=1, prefetch=1)
    shop.grant(lease(0), lease(1), lease(2))
    (declined,) = shop.of(Declined)
    assert declined.lease.number == 2 and "no room" in declined.reason
    assert shop.ends() == {(0, 0): [], (1, 0): [], (2, 0): ["declined"]}


@in_a_loop
async def test_a_resent_grant_starts_nothing_twice(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    shop.grant(lease(0), lease(0))
    shop.grant(lease(0))
    await shop.quiet()
    shop.grant(lease(0))
    await shop.quiet()
    assert len(shop.of(Finished)) == 1 and shop.ends() == {(0, 0): ["finished"]}


@in_a_loop
async def test_revoking_what_runs_what_waits_and_what_never_came_is_always_answered(tmp_path: Path) -> None:
    shop = held(tmp_path, slots=1, prefetch=1)
    shop.grant(lease(0), lease(1))
    await shop.asked()
    for number in (1, 5, 0):
        shop.foreman.on_revoke(Revoke(LeaseId(0, number, 0), "too old"))
    await shop.quiet()
    assert [(m.lease.number, m.reason, m.retry) for m in shop.of(Failed)] == [
        (1, "too old", False),
        (5, "too old", False),
        (0, "too old", False),
    ]
    assert shop.ends() == {(0, 0): ["revoked"], (1, 0): ["revoked"]}
    shop.foreman.on_revoke(Revoke(LeaseId(0, 0, 0), "too old"))
    assert len(shop.of(Failed)) == 3, "what has ended was answered"


@in_a_loop
async def test_a_newer_attempt_stops_the_older_one_and_then_runs(tmp_path: Path) -> None:
    shop = held(tmp_path)
    shop.grant(lease(0))
    await shop.asked()
    shop.grant(lease(0, epoch=1))
    shop.answer()
    await shop.quiet()
    assert shop.ends() == {(0, 0): ["revoked"], (0, 1): ["finished"]}


@in_a_loop
async def test_failures_free_their_slot_for_the_next_lease(tmp_path: Path) -> None:
    shop = ready(tmp_path, slots=1, prefetch=9)
    bad = [lease(number, state_hash="0" * 64) for number in range(5)]
    shop.grant(*bad, lease(9))
    await shop.quiet()
    assert [m.lease.number for m in shop.of(Failed)] == [0, 1, 2, 3, 4]
    assert [m.lease.number for m in shop.of(Finished)] == [9]
    assert not shop.errors and shop.foreman.table.running == 0


@in_a_loop
async def test_a_dead_engine_ends_the_process_with_its_error_after_every_lease_was_given_back(
    tmp_path: Path,
) -> None:
    shop = ready(tmp_path)
    shop.engine.dead = True

    async def dead(*arguments: object) -> Any:
        raise EngineError("the engine died")

    shop.engine.score = dead  # type: ignore[assignment, method-assign]
    shop.grant(lease(0), lease(1))
    await shop.quiet()
    assert [(m.lease.number, m.retry) for m in shop.of(Failed)] == [(0, True), (1, True)]
    assert [str(error) for error in shop.errors] == ["the engine died"] * 2


@in_a_loop
async def test_one_request_that_the_engine_refuses_does_not_end_the_process(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    plain = shop.engine.generate

    async def picky(request: Any) -> Any:
        if request.session == str(LeaseId(0, 0, 0)):
            raise EngineError("the context holds an id that the model lacks")
        return await plain(request)

    shop.engine.generate = picky  # type: ignore[method-assign]
    shop.grant(lease(0), lease(1))
    await shop.quiet()
    assert [m.lease.number for m in shop.of(Failed)] == [0]
    assert [m.lease.number for m in shop.of(Finished)] == [1] and not shop.errors


@in_a_loop
async def test_an_unexpected_exception_in_a_lease_is_not_swallowed(tmp_path: Path) -> None:
    shop = ready(tmp_path)

    async def bug(request: Any) -> Any:
        raise AttributeError("a bug")

    shop.engine.generate = bug  # type: ignore[method-assign]
    shop.grant(lease(0))
    await shop.quiet()
    assert [type(error) for error in shop.errors] == [AttributeError]
    assert shop.foreman.table.running == 0


@in_a_loop
async def test_an_engine_that_stands_still_is_noticed_and_one_that_is_only_idle_is_not(
    tmp_path: Path,
) -> None:
    shop = held(tmp_path)
    for _ in range(100):
        shop.foreman.tick(0.5)
    shop.grant(lease(0, deadline_s=1.0))
    await shop.asked()
    for _ in range(4):
        shop.foreman.tick(0.5)
    with pytest.raises(EngineError, match="1 leases run and none took a turn"):
        shop.foreman.tick(0.6)
    shop.answer()
    await shop.quiet()


@in_a_loop
async def test_a_task_that_cannot_be_set_up_is_reported(tmp_path: Path) -> None:
    shop = ready(tmp_path)
    shop.foreman.on_inspect(Inspect(1, TaskId("frozenlake", "nowhere", 0)))
    await shop.quiet()
    (failed,) = shop.of(InspectFailed)
    assert failed.tree == 1 and "splits are" in failed.reason and not shop.errors


@in_a_loop
async def test_leaving_declines_what_waits_stops_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    shop = held(tmp_path, slots=1, prefetch=2)
    shop.grant(lease(0), lease(1))
    await shop.asked()
    shop.foreman.stop("the actor was stopped", retry=True)
    shop.grant(lease(2))
    shop.foreman.on_inspect(Inspect(4, TaskId("frozenlake", "train", 0)))
    assert await shop.foreman.idle(5.0)
    await shop.quiet()
    assert [m.lease.number for m in shop.of(Declined)] == [1, 2]
    assert [(m.lease.number, m.retry, m.reason) for m in shop.of(Failed)] == [
        (0, True, "the actor was stopped")
    ]
    assert [m.tree for m in shop.of(InspectFailed)] == [4]
    assert shop.ends() == {(0, 0): ["failed"], (1, 0): ["declined"], (2, 0): ["declined"]}


@in_a_loop
async def test_a_retry_counts_the_turns_of_all_its_attempts(tmp_path: Path) -> None:
    shop = held(tmp_path)
    resumed = msgspec.structs.replace(lease(0, epoch=1), offset=2)
    shop.grant(resumed)
    await shop.asked()
    shop.foreman.on_revoke(Revoke(resumed.id, "too old"))
    await shop.quiet()
    ended = [record for kind, record in shop.journal() if kind == "ended"]
    assert [record["turns"] for record in ended] == [2]


@in_a_loop
async def test_time_is_spent_on_work_or_waiting_for_leases_or_for_weights(tmp_path: Path) -> None:
    shop = held(tmp_path)
    loop = asyncio.get_running_loop()

    async def spent(pause_s: float = 0.02) -> dict[str, float]:
        """Seconds by state during a pause."""
        before = shop.foreman.spending.totals(loop.time())
        await asyncio.sleep(pause_s)
        after = shop.foreman.spending.totals(loop.time())
        return {state: s - before.get(state, 0.0) for state, s in after.items() if s > before.get(state, 0.0)}

    assert set(await spent()) == {"leases"}, "nothing was granted"
    shop.grant(lease(0, min_version=Version(0, 1)))
    assert set(await spent()) == {"weights"}, "it may not start under the weights held"
    shop.grant(lease(1))
    await shop.asked()
    assert set(await spent()) == {"work"}
    shop.answer()
    await shop.quiet()
    assert set(await spent()) == {"weights"}
    assert sum(shop.foreman.spending.totals(loop.time()).values()) > 0.08
