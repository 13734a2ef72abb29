"""A core thawed from its frozen books goes on as the frozen one does, and no field of the books is forgotten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator.budgets import make_budget
from allocator.core import AllocatorCore, Handled, Send
from allocator.rules import make_rule
from allocator.settings import Settings
from allocator.snapshot import BOOKS, FORMS, LEFT_OUT, freeze, shape, thaw
from benchmarks.fleet import Fleet, FleetConfig
from common.config_allocator import (
    PREDICTORS,
    RULE_SCHEMAS,
    AdaptiveConfig,
    BudgetConfig,
    PredictorConfig,
    RandomRuleConfig,
    RuleConfig,
    TraceRootsConfig,
)
from common.errors import StorageError
from common.messages import Message
from common.nouns import Version
from common.predictors import make_predictor
from tests.allocator.harness import Rig, granted
from tests.allocator.test_fleet import FAULTY

BEHIND = 400
"""Inputs for which a thawed core is watched."""


class Frozen:
    """A faulty fleet, and beside its core, from event `at` on, one that was thawed from it."""

    def __init__(
        self, seed: int, rule: RuleConfig, budget: BudgetConfig, predictor: str, at: int, staleness: int
    ) -> None:
        bounds = Settings(
            steps=6, batch_trees=4, max_policy_lag=1, max_score_staleness=staleness, lease_deadline_s=12.0,
            connect_timeout_s=1e6,
        )  # fmt: skip

        def fresh() -> AllocatorCore:
            chosen = make_rule(rule), make_budget(budget, bounds.batch_trees)
            return AllocatorCore(bounds, *chosen, make_predictor(PredictorConfig(name=predictor)))

        shape = FleetConfig(actors=5, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=FAULTY)
        self.fleet = Fleet(bounds, shape, rule, budget, seed)
        self.fleet.core = self.core = fresh()
        self.fresh: Callable[[], AllocatorCore] = fresh
        self.at, self.inputs = at, 0
        self.twin: AllocatorCore | None = None
        self._handle, self._tick = self.core.handle, self.core.tick
        self.core.handle, self.core.tick = self.handle, self.tick  # type: ignore[method-assign]

    def handle(self, peer: str, message: Message, now: float) -> Handled:
        self._freeze_if_due()
        handled = self._handle(peer, message, now)
        if self.twin is not None:
            assert self.twin.handle(peer, message, now) == handled
            self._same_records()
        return handled

    def tick(self, now: float) -> list[Send]:
        self._freeze_if_due()
        sends = self._tick(now)
        if self.twin is not None:
            assert self.twin.tick(now) == sends
            self._same_records()
        return sends

    def _freeze_if_due(self) -> None:
        self.inputs += 1
        if self.inputs == self.at:
            self.twin = self.fresh()
            thaw(self.twin, freeze(self.core))
            assert books(self.twin) == books(self.core), "what was thawed freezes to the same"
            assert self.twin.audit() == []

    def _same_records(self) -> None:
        assert self.twin is not None
        assert self.twin.take_records() == self.core.state.records

    def run(self) -> None:
        self.fleet.run(max_events=self.at + BEHIND)
        if self.twin is not None:
            assert books(self.twin) == books(self.core)
            assert self.twin.stats() == self.core.stats()


def books(core: AllocatorCore) -> Any:
    """What is frozen, as values that compare."""
    return msgspec.msgpack.decode(freeze(core), type=BOOKS)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rule=st.sampled_from([RuleConfig(), RandomRuleConfig()]),
    at=st.integers(1, 1500),
    staleness=st.sampled_from([0, 2, 8]),
)
def test_a_thawed_core_decides_as_the_frozen_one(
    seed: int, rule: RuleConfig, at: int, staleness: int
) -> None:
    """Same sends, same records, same acknowledgements, through losses, deaths and silences."""
    Frozen(seed, rule, BudgetConfig(continuations=6), "history", at, staleness).run()


@pytest.mark.parametrize("rule", sorted(RULE_SCHEMAS))
@pytest.mark.parametrize("at", [150, 700])
def test_the_books_of_every_rule_are_kept(rule: str, at: int) -> None:
    Frozen(1, RULE_SCHEMAS[rule](), BudgetConfig(continuations=6), "history", at, 4).run()


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize(
    "budget",
    [BudgetConfig(continuations=4), TraceRootsConfig(), AdaptiveConfig()],
    ids=lambda each: each.name,
)
@pytest.mark.parametrize("at", [90, 500, 1100])
def test_what_budgets_and_predictors_have_learnt_is_kept(
    budget: BudgetConfig, predictor: str, at: int
) -> None:
    Frozen(2, RandomRuleConfig(), budget, predictor, at, 4).run()


# ------------------------------------------------------------------------------------------- every field


def fields_of(kind: type, core: AllocatorCore) -> set[str]:
    """The fields of a class, as it declares them or as it has them."""
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    state = core.state
    parts = (core, state, state.peers, state.leases, state.forest, state.delivery, state.waves)
    (found,) = [part for part in parts if type(part) is kind]
    return set(vars(found))


@pytest.mark.parametrize("kind", LEFT_OUT, ids=lambda kind: kind.__name__)
def test_every_field_is_kept_or_left_out_for_a_reason(kind: type) -> None:
    kept = set(FORMS[kind].names) if kind in FORMS else set()
    left_out = LEFT_OUT[kind]
    assert not kept & set(left_out), "one or the other"
    assert kept | set(left_out) == fields_of(kind, Rig().core), (
        "a new field of the books must be named in allocator/snapshot.py: in the form of its class, or in LEFT_OUT"
    )
    assert all(left_out.values())


def test_a_reminder_of_a_new_kind_cannot_be_forgotten() -> None:
    core = Rig().core
    core.state.remind(1.0, "lunch", None)
    with pytest.raises(RuntimeError, match="no reminders of the kind 'lunch'"):
        freeze(core)


# ------------------------------------------------------------------------------------ what does not fit


def worked() -> Rig:
    rig, actor, (lease, *_) = granted()
    rig.start(actor, lease)
    rig.core.take_records()
    return rig


def test_books_of_another_rule_or_budget_are_refused() -> None:
    other = Rig(rule=RandomRuleConfig())
    with pytest.raises(
        StorageError, match="of a run with flat, fixed, HistoryPredictor, this one has random"
    ):
        thaw(other.core, freeze(worked().core))


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "reference"])
def test_damaged_books_are_one_sentence(damage: str) -> None:
    rig = worked()
    data = freeze(rig.core)
    found = books(rig.core)
    found.leases._heap.append((99, 0))
    damaged = {
        "cut": data[:-9],
        "empty": b"",
        "other": msgspec.msgpack.encode({"x": 1}),
        "reference": msgspec.msgpack.encode(found),
    }
    with pytest.raises(StorageError, match="does not fit this release"):
        thaw(Rig().core, damaged[damage])


def test_the_shape_names_the_fields() -> None:
    assert shape() == shape() and len(shape()) == 16


def test_a_version_of_the_weights_and_an_ending_are_kept() -> None:
    rig = worked()
    rig.core.stop(6, "drill", rig.now)
    twin = Rig().core
    thaw(twin, freeze(rig.core))
    assert twin.state.version == Version(0, 0) and twin.ending == rig.core.ending
    assert twin.live_leases == rig.core.live_leases > 0
