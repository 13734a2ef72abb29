"""An allocator killed at any moment goes on from its journal: nothing is lost, nothing is repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import allocator.core
import allocator.door
from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Exit, Handled, Send
from allocator.delivery import Delivery
from allocator.door import restart
from allocator.leases import EPOCHS_A_BOOT
from allocator.recovery import recover
from allocator.replay import Replay, replay
from allocator.rules import make_rule
from allocator.rules.base import Decision, TreeView
from allocator.rules.random import RandomRule
from allocator.settings import Settings
from allocator.snapshot import freeze
from allocator.snapshots import (
    MOST_INPUTS,
    TAIL_INPUTS,
    Snapshots,
    newest_first,
    read_snapshot,
    write_snapshot,
)
from allocator.state import CoreState
from benchmarks.fleet import Faults, Fleet, FleetConfig
from common.audit_books import read_books
from common.audit_laws import (
    each_issued_lease_ends_once,
    each_place_holds_one_accepted_turn,
    tokens_of_a_tree_are_those_accepted,
    turns_of_a_result_were_accepted,
)
from common.audit_tree_laws import each_opened_tree_ends_once
from common.config_allocator import (
    AdaptiveConfig,
    BudgetConfig,
    PredictorConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
)
from common.errors import ConfigError, StorageError
from common.journal import JournalWriter, read_journal
from common.messages import (
    Bye,
    Committed,
    Expanded,
    Failed,
    Heartbeat,
    Hello,
    Message,
    Revoke,
    TreeReady,
)
from common.nouns import LeaseId, Turn, TurnStatus, Version
from common.predictors import make_predictor
from tests.allocator.harness import LEARNER, Rig, hello, small
from tests.allocator.mortal import Mortal
from tests.allocator.test_fleet import FAULTY
from tests.allocator.test_machine import Model
from tests.allocator.test_sequential import LOOKING, RULES, Crowd, PlainSearch, assert_equal

CALM = Faults()


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine dies here: what was written stays, synced or not."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


LAWS = (
    each_issued_lease_ends_once,
    each_place_holds_one_accepted_turn,
    tokens_of_a_tree_are_those_accepted,
    turns_of_a_result_were_accepted,
    each_opened_tree_ends_once,
)
"""Those that need the allocator's journal alone."""


class RestartModel(Model):
    """The law over the records of all processes together: epochs grow, and never twice the same."""

    def on_lease_issued(self, tree: int, number: int, epoch: int, peer: str) -> None:
        self.newest[tree, number] = max(epoch - 1, self.newest.get((tree, number), -1))
        super().on_lease_issued(tree, number, epoch, peer)


class MortalFleet(Fleet):
    """A fleet whose allocator is killed at every `every`-th event, in the middle of writing it down."""

    def __init__(
        self,
        folder: Path,
        every: int,
        seed: int,
        rule: RuleConfig,
        faults: Faults,
        snapshots: int = 0,
        budget: BudgetConfig | None = None,
        predictor: str = "history",
    ) -> None:
        bounds = Settings(
            steps=6, batch_trees=4, max_policy_lag=1, max_score_staleness=2, lease_deadline_s=12.0,
            connect_timeout_s=1e6,
        )  # fmt: skip
        budget = budget or BudgetConfig(continuations=6)

        def fresh() -> AllocatorCore:
            chosen = make_rule(rule), make_budget(budget, bounds.batch_trees)
            return AllocatorCore(bounds, *chosen, make_predictor(PredictorConfig(name=predictor)))

        shape = FleetConfig(actors=5, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=faults)
        super().__init__(bounds, shape, rule, budget, seed)
        self.fresh: Callable[[], AllocatorCore] = fresh
        self.mortal = Mortal(fresh, folder, seed)
        self.mortal.snapshot_every = snapshots
        self.mortal.on_stranger = self._asked_to_say_hello
        self.core: Any = self.mortal
        self.every, self.inputs = every, 0
        self.hellos: dict[str, Hello] = {}
        self.on_the_way: dict[int, Send] = {}

    def deliver(self, key: str, message: Message) -> Handled:
        if isinstance(message, Hello):
            self.hellos[key] = message
        if self._dies() and key in self.mortal.known:
            core, now = self.mortal.core, self.now
            self.mortal.killed_within(lambda: core.handle(key, message, now), now, key, message)
            self._lose_what_is_on_the_way()
            return Handled([], False)
        return super().deliver(key, message)

    def _dies(self) -> bool:
        self.inputs += 1
        return self.inputs % self.every == 0 and not self.over

    def _asked_to_say_hello(self, key: str) -> None:
        """The new process answers a stranger with its name; the stranger says hello."""
        peer, hello = self.peers[key], self.hellos.get(key)
        if hello is None:
            return  # its first hello is on its way
        if hello.role == "learner":
            hello = msgspec.structs.replace(hello, version=peer.version)
        self.after(self.latency(), lambda: peer.line.alive and self.deliver(key, hello))

    def _after_input(self, key: str, what: str, ack: bool, sends: list[Send]) -> None:
        self.on_the_way.update({id(send): send for send in sends})
        super()._after_input(key, what, ack, sends)

    def _lose_what_is_on_the_way(self) -> None:
        """Of what the dead process had sent, half still arrives."""
        self.on_the_way = {k: send for k, send in self.on_the_way.items() if self.rng.random() < 0.5}

    def _arrive(self, send: Send) -> None:
        if self.on_the_way.pop(id(send), None) is not None:
            super()._arrive(send)


def check(fleet: MortalFleet, kills: int, events: int = 60_000) -> None:
    """The run came to its end, and every id is in one place, over the records of all processes."""
    result = fleet.run(max_events=events)
    stats, mortal = result["stats"], fleet.mortal
    assert fleet.config.faults != CALM or stats["leases/dropped"] == 0
    assert result["ended"] and mortal.kills >= kills
    assert mortal.core.audit() == []
    assert stats["trees/committed"] == 24
    assert stats["trees/opened"] == 24 + stats["trees/dropped"]
    records = mortal.records()
    model = RestartModel()
    for record in records:
        model.read(record.kind, record.fields)
    books = read_books(mortal.rundir.allocator_journal, [], mortal.rundir.learner_journal)
    books.learner.ever_dropped = set(books.allocator.dropped)  # it keeps no journal here
    assert [finding for law in LAWS for finding in law(books)] == []
    assert len(books.allocator.recoveries) == mortal.kills
    assert replay(fleet.fresh(), records) == [], "the whole journal replays, through every restart"


@pytest.mark.parametrize("every", [83, 307])
@pytest.mark.parametrize("rule", [RuleConfig(), RandomRuleConfig()], ids=["flat", "random"])
@pytest.mark.parametrize("faults", [CALM, FAULTY], ids=["calm", "faulty"])
def test_a_run_whose_allocator_dies_again_and_again_comes_to_its_end(
    every: int, rule: RuleConfig, faults: Faults, tmp_path: Path
) -> None:
    """The journal breaks off at an arbitrary byte, half of what was on the way is lost, peers know nothing of
    it."""
    fleet = MortalFleet(tmp_path, every, 1, rule, faults, snapshots=50)
    check(fleet, kills=3)
    assert any(recovery.snapshot for recovery in fleet.mortal.recoveries)


@pytest.mark.parametrize(
    "budget", [TraceRootsConfig(candidates=2), AdaptiveConfig()], ids=lambda budget: budget.name
)
def test_what_was_learnt_and_pooled_outlives_the_allocator_too(budget: BudgetConfig, tmp_path: Path) -> None:
    check(MortalFleet(tmp_path, 151, 4, RandomRuleConfig(), CALM, 70, budget, "shared"), kills=3)


def trees_being_set_up_forgotten(s: CoreState, boot: int) -> None:
    restart(s, boot)
    s.uninspected.clear()


PLANTED: dict[str, tuple[object, str, object]] = {
    "what was delivered does not go again": (Delivery, "take_back", lambda self: None),
    "what the last input led to is not completed": (Replay, "outstanding", lambda self: []),
    "trees that were being set up are forgotten": (allocator.core, "restart", trees_being_set_up_forgotten),
    "a restart counts as a failure": (
        allocator.door, "_fence", lambda s, peer: allocator.door._take_work(s, peer, "fenced", "restarted"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_noticed(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*PLANTED[bug])
    with pytest.raises((AssertionError, KeyError, StorageError)):
        check(MortalFleet(tmp_path, 60, 2, RandomRuleConfig(), CALM, snapshots=50), kills=3, events=8_000)


def test_without_any_snapshot_the_whole_journal_is_replayed(tmp_path: Path) -> None:
    fleet = MortalFleet(tmp_path, 211, 2, RandomRuleConfig(), CALM)
    check(fleet, kills=3)
    assert all(r.replayed == r.inputs and not r.snapshot for r in fleet.mortal.recoveries)


def test_deaths_of_the_allocator_cost_no_turn_that_was_accepted(tmp_path: Path) -> None:
    """What was accepted before is never sampled again, and ends up in the same trees."""

    def turns(every: int) -> dict[tuple[int, int, int], int]:
        fleet = MortalFleet(tmp_path / str(every), every, 3, RuleConfig(), CALM, snapshots=40)
        check(fleet, kills=0)
        found = [r.fields for r in fleet.mortal.records() if r.kind == "turn_accepted"]
        return {(f["tree"], f["number"], f["offset"]): f["tokens"] for f in found}

    assert turns(101) == turns(10**9)


# ----------------------------------------------------------------------------------------- the same trees


class MortalCrowd(Crowd):
    """The crowd of the sequential search, over a core that dies every now and then."""

    def __init__(self, folder: Path, rule: RuleConfig, continuations: int, seed: int) -> None:
        super().__init__(rule, continuations, seed, 0.15)
        settings, budget = self.rig.core.state.settings, BudgetConfig(continuations=continuations)
        self.mortal = Mortal(
            lambda: AllocatorCore(settings, make_rule(rule), make_budget(budget, settings.batch_trees)),
            folder,
            seed,
        )
        self.mortal.snapshot_every = 60
        self.rig.core = self.mortal  # type: ignore[assignment]

    def move(self) -> None:
        if self.rng.random() < 0.01:
            self.mortal.kill(self.rig.now)
            self.rig.learner()
            for key in self.held:
                self.rig.actor(key, slots=3, prefetch=2)
        super().move()


@pytest.mark.parametrize("config, name, continuations", [*RULES, *LOOKING], ids=lambda each: str(each)[:12])
def test_a_core_that_dies_grows_the_trees_of_the_plain_sequential_search(
    config: RuleConfig, name: str, continuations: int, tmp_path: Path
) -> None:
    crowd = MortalCrowd(tmp_path, config, continuations, 5)
    grown = crowd.grow()
    assert crowd.mortal.kills >= 3
    for tree, runs in zip(grown, PlainSearch(name, continuations).trees(), strict=True):
        assert_equal(tree, runs)


# -------------------------------------------------------------------------------------- where it breaks off


def worked(folder: Path) -> Mortal:
    """A little of a run: two actors at work on the first trees, one of them delivered."""
    rig = Rig(small(steps=3), RandomRuleConfig(chains=2, expansions=1), continuations=4)
    settings, rule, budget = rig.core.state.settings, rig.core.state.rule, BudgetConfig(continuations=4)
    mortal = Mortal(lambda: AllocatorCore(settings, rule, make_budget(budget)), folder)
    rig.core = mortal  # type: ignore[assignment]
    rig.check_law = False
    rig.learner(credit=1)
    rig.actor("a/1", slots=3)
    rig.actor("b/1", slots=2)
    rig.work("a/1")
    rig.inspect("b/1")
    for lease in rig.leases("b/1"):
        rig.start("b/1", lease)
        rig.expand("b/1", lease, 0)
    rig.tick(0.2)
    return mortal


def test_a_journal_cut_at_any_byte_is_taken_up(tmp_path: Path) -> None:
    """Cuts at, before and behind every record; whoever takes it up completes what the last input led to."""
    mortal = worked(tmp_path)
    mortal.journal.close()
    journal = mortal.rundir.allocator_journal
    whole = journal.read_bytes()
    ends = [record.end for record in mortal.records()]
    for keep in sorted({end + by for end in ends for by in (-1, 0, 1, 9, 40) if end + by <= len(whole)}):
        journal.write_bytes(whole[:keep] + (b"\0" * 40 if keep % 3 == 0 else b""))
        found = recover(mortal.fresh, mortal.rundir)
        assert found.sound_to <= keep + 40 and found.boot == (found.sound_to > 8)
        with JournalWriter(journal, found.sound_to) as writer:
            found.begin(writer, found.now, run="run")
        assert found.core.audit() == [] and found.core.live_leases == 0
        assert replay(mortal.fresh(), read_journal(journal)) == []


def test_what_the_journal_lacks_of_the_last_input_is_written_before_anything_else(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    records = mortal.records()
    ready = next(i for i, record in enumerate(records) if record.kind == "tree_ready")
    mortal.kill(mortal.core.state.now, keep=records[ready].offset)
    again = mortal.records()
    assert again[: ready + 1] == records[: ready + 1]
    assert [r.kind for r in again[ready : ready + 2]] == ["tree_ready", "tree_delivered"]
    begun = next(i for i, record in enumerate(again) if record.kind == "start" and i > 0)
    assert [r.kind for r in again[begun : begun + 2]] == ["start", "recovered"]


def test_every_process_counts_epochs_from_a_number_of_its_own(tmp_path: Path) -> None:
    """What the dead one had granted, and not got to disk, cannot have the epoch of anything granted later."""
    mortal = worked(tmp_path)
    issued = [r for r in mortal.records() if r.kind == "lease_issued"]
    told = max(r.offset for r in mortal.records() if r.kind == "input" and r.offset < issued[-3].offset)
    mortal.kill(mortal.core.state.now, keep=told)
    rig = Rig()
    rig.core, rig.check_law = mortal, False  # type: ignore[assignment]
    rig.learner()
    rig.actor("a/1", slots=8)
    rig.inspect("a/1")
    rig.work("a/1")
    lost = {(r.fields["tree"], r.fields["number"], r.fields["epoch"]) for r in issued[-3:]}
    records = mortal.records()
    recovered = next(r.offset for r in records if r.kind == "recovered")
    after = [r.fields for r in records if r.kind == "lease_issued" and r.offset > recovered]
    assert after and all(fields["epoch"] >= EPOCHS_A_BOOT for fields in after)
    assert not lost & {(f["tree"], f["number"], f["epoch"]) for f in after}


# ------------------------------------------------------------------------------------------ what was out


def rig_of(mortal: Mortal) -> Rig:
    rig = Rig()
    rig.core, rig.check_law, rig.now = mortal, False, mortal.core.state.now  # type: ignore[assignment]
    return rig


def test_every_live_lease_is_fenced_and_its_late_turns_are_counted_once(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    live = [r.fields for r in mortal.records() if r.kind == "lease_issued" and r.fields["peer"] == "b/1"]
    mortal.kill(mortal.core.state.now)
    recovered = next(r.fields for r in mortal.records() if r.kind == "recovered")
    ends = [r.fields for r in mortal.records() if r.kind == "lease_ended" and r.fields["kind"] == "fenced"]
    assert recovered["fenced"] == len(ends) == 1 and ends[0]["reason"] == "the allocator was restarted"
    rig = rig_of(mortal)
    rig.actor("b/1", slots=2)
    revoked = rig.take("b/1", Revoke)
    assert {(r.lease.tree, r.lease.number) for r in revoked} == {(end["tree"], end["number"]) for end in ends}
    lease = LeaseId(live[-1]["tree"], live[-1]["number"], live[-1]["epoch"])
    late = Expanded(lease, 1, Turn(action=b"\1\0\0\0" * 3, status=TurnStatus.OPEN))
    for _ in range(2):
        assert rig.say("b/1", late).ack
    mortal.kill(rig.now)
    rig.actor("b/1", slots=2)
    assert rig.say("b/1", late).ack, "told again to the next process"
    assert rig.say("b/1", Failed(lease, "revoked", False, 2)).ack
    assert rig.stat("events/crossed_tokens") == 3 and rig.stat("events/discarded_tokens") == 2
    fenced = [r.fields["fenced"] for r in mortal.records() if r.kind == "recovered"]
    assert rig.stat("leases/fenced") == sum(fenced) and len(fenced) == 2


def test_a_restart_is_no_failure_of_a_continuation(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    for _ in range(10):
        mortal.kill(mortal.core.state.now)
        rig = rig_of(mortal)
        rig.learner()
        rig.actor("a/1", slots=8)
        rig.inspect("a/1")
        for lease in rig.leases("a/1"):
            rig.start("a/1", lease)
        for revoke in rig.take("a/1", Revoke):
            rig.say("a/1", Failed(revoke.lease, "revoked", False))
    branches = [b for tree in mortal.core.state.forest.trees.values() for b in tree.branches.values()]
    assert max(len(branch.endings) for branch in branches) >= 9
    assert all(branch.failures == 0 and not branch.ended.startswith("dropped") for branch in branches)


def test_trees_on_their_way_go_again_within_the_same_credit(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    before = [r.fields["tree"] for r in mortal.records() if r.kind == "tree_delivered"]
    assert len(before) == 1 == rig_of(mortal).stat("trees/delivered")
    mortal.kill(mortal.core.state.now)
    rig = rig_of(mortal)
    assert rig.stat("trees/delivered") == 0
    rig.learner(credit=1)
    assert [message.tree.id for message in rig.take(LEARNER, TreeReady)] == before
    assert mortal.core.audit() == []


def test_a_tree_that_was_trained_meanwhile_is_not_sent_again(tmp_path: Path) -> None:
    """The learner's word about it comes to the new process, before or after it goes again."""
    mortal = worked(tmp_path)
    (tree,) = [r.fields["tree"] for r in mortal.records() if r.kind == "tree_delivered"]
    mortal.kill(mortal.core.state.now)
    rig = rig_of(mortal)
    rig.say(LEARNER, hello("learner", LEARNER, version=Version(0, 1)))
    rig.consume([tree], 1)
    assert rig.stat("trees/consumed") == 1
    mortal.kill(rig.now)
    rig.sent.clear()
    rig.learner(credit=1, step=1)
    assert tree not in [message.tree.id for message in rig.take(LEARNER, TreeReady)]


def test_nobody_is_waited_for_longer_than_usual_after_a_restart(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    mortal.kill(mortal.core.state.now + 1000.0)
    rig = rig_of(mortal)
    limit = mortal.core.state.settings.connect_timeout_s
    rig.tick(limit - 1.0)
    assert mortal.core.ending is None
    rig.tick(2.0)
    assert mortal.core.ending is not None and "the learner is gone" in mortal.core.ending.reason


# --------------------------------------------------------------------------------------------- endings


def test_a_run_that_was_stopped_goes_on_with_all_its_continuations(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    rig = rig_of(mortal)
    rig.core.stop(6, "drill", rig.now)
    for kind, values in mortal.core.take_records():
        mortal.journal.append(kind, **values)
    live = [
        b.id for tree in mortal.core.state.forest.trees.values() for b in tree.branches.values() if b.live
    ]
    rig.say("b/1", Failed(live[0], "run ended", False))
    mortal.journal.append("end", in_flight_trees=[], in_flight_leases=[])
    mortal.journal.flush(sync=False)
    mortal.kill(rig.now)
    assert mortal.core.ending is None and mortal.core.audit() == []
    kinds = [r.fields["kind"] for r in mortal.records() if r.kind == "lease_ended"]
    assert kinds.count("run_ended") == 1 and kinds.count("fenced") == len(live) - 1
    branches = [b for tree in mortal.core.state.forest.trees.values() for b in tree.branches.values()]
    assert not any(b.ended in ("run_ended", "fenced") for b in branches), "none of them was given up"
    assert replay(mortal.fresh(), mortal.records()) == []


def test_a_run_that_is_over_is_not_taken_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mortal = worked(tmp_path)
    snapshot_of(mortal)
    mortal.handle(LEARNER, Bye(0, "done"), mortal.core.state.now)
    mortal.kill(mortal.core.state.now)
    assert mortal.core.ending == Exit(0, "the run is complete") and mortal.core.live_leases == 0
    mortal.journal.append("end", in_flight_trees=[], in_flight_leases=[])
    mortal.journal.flush(sync=False)
    with pytest.raises(StorageError, match="run has been trained already: resume="):
        mortal.kill(mortal.core.state.now)
    assert "snapshot" not in caplog.text, "it knows that from the newest one"


# ------------------------------------------------------------------------------------ damage and refusal


def snapshot_of(mortal: Mortal) -> Path:
    mortal.snapshots.take(mortal.core, mortal.journal.end, 0.0)
    mortal.snapshots.close()
    return next(newest_first(mortal.rundir.allocator_snapshots))


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "not one", "elsewhere"])
def test_a_damaged_snapshot_is_said_and_the_one_before_it_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mortal = worked(tmp_path)
    older = snapshot_of(mortal)
    mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
    newest = snapshot_of(mortal)
    assert newest != older
    data = newest.read_bytes()
    flipped = data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]
    newest.write_bytes(
        {"flipped": flipped, "cut": data[:-5], "empty": b"", "not one": b"x" * 99}.get(damage, data)
    )
    if damage == "elsewhere":
        newest.unlink()
        other = msgspec.structs.replace(read_snapshot(older), offset=int(newest.stem), run="another")
        write_snapshot(newest.parent, other)
    mortal.kill(mortal.core.state.now)
    assert mortal.recoveries[-1].snapshot == older.stem
    assert "what came before it is used" in caplog.text and str(newest.parent) in caplog.text
    assert mortal.core.audit() == [] and replay(mortal.fresh(), mortal.records()) == []


@pytest.mark.parametrize("left", [None, 0, 200])
def test_a_journal_that_is_shorter_than_when_its_snapshot_was_taken_is_refused(
    left: int | None, tmp_path: Path
) -> None:
    """What was confirmed as durable would be gone, and epochs that actors know might be given again."""
    mortal = worked(tmp_path)
    snapshot_of(mortal)
    journal = mortal.rundir.allocator_journal
    if left is None:
        journal.unlink()
    else:
        journal.write_bytes(journal.read_bytes()[:left])
    with pytest.raises(StorageError, match=r"journal\.tw must hold at least .* it was cut or removed"):
        recover(mortal.fresh, mortal.rundir)


def test_with_no_sound_snapshot_the_journal_alone_suffices(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    snapshot_of(mortal).write_bytes(b"")
    mortal.kill(mortal.core.state.now)
    assert mortal.recoveries[-1].snapshot == "" and mortal.core.audit() == []


def test_a_snapshot_that_leads_elsewhere_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sound by its checksum, and wrong: the journal behind it says so."""
    mortal = worked(tmp_path)
    path = snapshot_of(mortal)
    rig = rig_of(mortal)
    for lease in [
        b for tree in mortal.core.state.forest.trees.values() for b in tree.branches.values() if b.live
    ]:
        rig.say("b/1", Failed(lease.id, "drill", True))
    other = Rig(small(steps=3), RandomRuleConfig(chains=2, expansions=1), continuations=4)
    write_snapshot(path.parent, msgspec.structs.replace(read_snapshot(path), books=freeze(other.core)))
    mortal.kill(rig.now)
    assert "an older snapshot is used" in caplog.text and mortal.recoveries[-1].snapshot == ""
    assert mortal.core.audit() == []


def test_damage_in_the_journal_behind_the_snapshot_stops_with_its_place(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    snapshot_of(mortal)
    for _ in range(3):
        mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
    record = [r for r in mortal.records() if r.kind == "input"][-3]
    with mortal.rundir.allocator_journal.open("r+b") as file:
        file.seek(record.offset + 20)
        file.write(b"\xff\xff")
    with pytest.raises(StorageError, match=f"is damaged at byte {record.offset}"):
        mortal.kill(mortal.core.state.now)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    rig = Rig(small(decisive={"learner.batch_trees": "3", "seed": "0"}))
    mortal = Mortal(
        lambda: AllocatorCore(rig.core.state.settings, rig.core.state.rule, rig.core.state.budget), tmp_path
    )
    rig.core.state.settings = small(decisive={"learner.batch_trees": "4", "seed": "0"})
    with pytest.raises(ConfigError, match=r"batch_trees must be 3, with which this run was begun, got 4"):
        mortal.kill(1.0)


def test_a_journal_that_leads_elsewhere_now_is_refused_with_the_place(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    flat = Rig(small(steps=3), RuleConfig(), continuations=4)
    mortal.fresh = lambda: AllocatorCore(
        flat.core.state.settings, flat.core.state.rule, flat.core.state.budget
    )
    with pytest.raises(StorageError, match=r"use the release that began it \(at byte \d+"):
        mortal.kill(mortal.core.state.now)


def test_an_input_that_breaks_the_core_is_named_and_not_tried_for_ever(tmp_path: Path) -> None:
    class Stubborn(RandomRule):
        def decide(self, view: TreeView) -> Decision:
            raise RuntimeError("rule 'random' is at a loss")

    mortal = worked(tmp_path)
    core = mortal.core
    mortal.fresh = lambda: AllocatorCore(
        core.state.settings, Stubborn(2, 1), make_budget(BudgetConfig(continuations=4))
    )
    with pytest.raises(
        StorageError, match=r"at byte \d+ of its journal the allocator fails: rule 'random' is at a loss"
    ):
        mortal.kill(core.state.now)


# --------------------------------------------------------------------------------------------- snapshots


def test_the_newest_two_snapshots_stay(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    found = []
    for _ in range(4):
        mortal.handle("a/1", Heartbeat(1, 0), mortal.core.state.now)
        found.append(snapshot_of(mortal))
    assert list(newest_first(found[0].parent)) == found[:1:-1]


def test_a_snapshot_is_due_after_so_many_inputs_and_not_sooner_than_it_is_worth(tmp_path: Path) -> None:
    mortal = worked(tmp_path)
    snapshots = Snapshots(tmp_path / "s", tail=TAIL_INPUTS - 1)
    assert not snapshots.due(10**6, 100.0)
    snapshots.count_input()
    assert snapshots.due(10**6, 100.0)
    snapshots.take(mortal.core, 10**6, 100.0)
    snapshots.close()
    assert snapshots.written == 1 and snapshots.tail == 0 and snapshots.bytes > 0
    snapshots.tail, snapshots.pause_s = TAIL_INPUTS, 1.0
    assert not snapshots.due(10**6 + snapshots.bytes // 20, 1e6), "the journal has hardly grown"
    assert snapshots.due(10**6 + snapshots.bytes, 1e6)
    snapshots._not_before = 1e6 + 1
    assert not snapshots.due(10**9, 1e6), "the last one took long"
    snapshots.tail = MOST_INPUTS
    assert snapshots.due(10**6, 1e6), "whatever it costs"


def test_a_snapshot_that_cannot_be_written_is_said_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mortal = worked(tmp_path)
    (tmp_path / "file").write_text("")
    snapshots = Snapshots(tmp_path / "file")
    snapshots.take(mortal.core, 1, 0.0)
    snapshots.close()
    assert snapshots.failed == 1 and "no snapshot was taken" in caplog.text


# ------------------------------------------------------------------------------------- more updates than before


def to_the_end(folder: Path, steps: int) -> tuple[Rig, Mortal]:
    """A run of `steps` updates of two trees each, complete."""
    rig = Rig(small(steps=steps, decisive={"learner.steps": str(steps)}))
    rule, budget = rig.core.state.rule, rig.core.state.budget
    mortal = Mortal(lambda: AllocatorCore(rig.core.state.settings, rule, budget), folder)
    settings = mortal.core.state.settings
    mortal.fresh = lambda: AllocatorCore(settings, make_rule(RuleConfig()), budget)
    rig.core, rig.check_law = mortal, False  # type: ignore[assignment]
    train(rig, 0, steps)
    return rig, mortal


def train(rig: Rig, done: int, steps: int, process: str = "1") -> None:
    """The updates from `done` to `steps`, and the learner's goodbye; each process under another name."""
    learner = rig.learner(step=done, lineage=int(process) - 1, incarnation=process)
    rig.actor(actor := f"a/{process}")
    for step in range(done + 1, steps + 1):
        rig.work(actor)
        trees = [message.tree.id for message in rig.take(learner, TreeReady)]
        assert trees == [2 * step - 2, 2 * step - 1]
        rig.consume(trees, step, int(process) - 1, learner)
        rig.say(learner, Committed(Version(int(process) - 1, step), trees))
    rig.work(actor)
    rig.say(learner, Bye(0, "all steps are done"))


@pytest.mark.parametrize("snapshots", [0, 5])
def test_a_complete_run_goes_on_when_it_is_to_make_more_updates(tmp_path: Path, snapshots: int) -> None:
    rig, mortal = to_the_end(tmp_path, 2)
    assert mortal.core.ending is not None and mortal.core.state.delivery.opened == 4
    mortal.journal.append("end", in_flight_trees=[], in_flight_leases=[])
    mortal.journal.flush(sync=False)
    with pytest.raises(StorageError, match="has been trained already"):
        recover(mortal.fresh, mortal.rundir)
    begun = mortal.fresh
    for steps in (3, 5):
        more = begun().state.settings.changed({"learner.steps": str(steps)})
        mortal.fresh = lambda s=more: AllocatorCore(s, make_rule(RuleConfig()), begun().state.budget)  # type: ignore[misc]
        mortal.snapshot_every = snapshots
        mortal.kill(rig.now)
        assert mortal.core.ending is None
        train(rig, {3: 2, 5: 3}[steps], steps, process=str(steps))
        assert mortal.core.audit() == []
        assert mortal.core.state.delivery.committed == 2 * steps
    # A replay, under whichever number of updates, meets the changes where the processes made them.
    assert replay(begun(), mortal.records()) == replay(mortal.fresh(), mortal.records()) == []


def test_a_run_is_not_taken_up_with_fewer_updates(tmp_path: Path) -> None:
    _, mortal = to_the_end(tmp_path, 2)
    fewer = mortal.core.state.settings.changed({"learner.steps": "1"})
    mortal.fresh = lambda: AllocatorCore(fewer, make_rule(RuleConfig()), mortal.core.state.budget)
    with pytest.raises(ConfigError, match=r"learner\.steps must be 2 or more.*got 1"):
        mortal.kill(1.0)


def test_waits_may_change_between_two_processes(tmp_path: Path) -> None:
    rig = Rig(small(decisive={"cluster.dead_after_s": "10.0"}))
    settings, rule, budget = rig.core.state.settings, rig.core.state.rule, rig.core.state.budget
    mortal = Mortal(lambda: AllocatorCore(settings, rule, budget), tmp_path)
    longer = settings.changed({"cluster.dead_after_s": "25.0"})
    mortal.fresh = lambda: AllocatorCore(longer, rule, budget)
    mortal.kill(1.0)
    assert mortal.core.state.settings.dead_after_s == mortal.core.state.delivery.settings.dead_after_s == 25.0
    starts = [record.fields["settings"] for record in mortal.records() if record.kind == "start"]
    assert [each["cluster.dead_after_s"] for each in starts] == ["10.0", "25.0"]


@pytest.mark.parametrize("lag", [0, 2])
def test_after_allocator_and_learner_were_resumed_no_burst_of_trees_is_opened(
    tmp_path: Path, lag: int
) -> None:
    """AReaL #1345: the version was restored, what had been accepted was not, and stale work piled up."""
    rig = Rig(small(steps=20, max_policy_lag=lag))
    settings, rule, budget = rig.core.state.settings, rig.core.state.rule, rig.core.state.budget
    mortal = Mortal(lambda: AllocatorCore(settings, rule, budget), tmp_path)
    rig.core, rig.check_law = mortal, False  # type: ignore[assignment]
    opened = []
    for process in range(3):
        learner = rig.learner(step=process, lineage=process, incarnation=str(process))
        rig.actor(f"a/{process}", slots=64)
        rig.work(f"a/{process}")
        trees = [message.tree.id for message in rig.take(learner, TreeReady)][:2]
        rig.consume(trees, process + 1, process, learner)
        rig.say(learner, Committed(Version(process, process + 1), trees))
        rig.work(f"a/{process}")
        opened.append(mortal.core.state.delivery.opened)
        mortal.kill(rig.now)
    assert opened == [(step + lag + 1) * 2 for step in (1, 2, 3)], "(step + K + 1) batches, and none again"
