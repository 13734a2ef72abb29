"""An allocator killed at any moment goes on from its journal: nothing is lost, nothing is repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import allocator.core
import allocator.door
from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Handled, Send
from allocator.delivery import Delivery
from allocator.door import restart
from allocator.replay import Replay, replay
from allocator.rules import make_rule
from allocator.settings import Settings
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
from common.errors import StorageError
from common.messages import Hello, Message
from common.predictors import make_predictor
from tests.allocator.mortal import Mortal
from tests.allocator.test_fleet import FAULTY
from tests.allocator.test_machine import Model
from tests.allocator.test_sequential import LOOKING, RULES, Crowd, PlainSearch, assert_equal

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

CALM = Faults()

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


# ---------------------------------------------------------------------------------------- the same trees


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
