"""A simulated world of hidden probabilities: seeds decide, snapshots carry the state, the policy may drift."""

from __future__ import annotations

import math
import statistics

import pytest

from allocator.settings import Settings
from benchmarks.fleet import Faults, Fleet, FleetConfig
from benchmarks.fleet_population import _UNPACK, PopulationWorld, pack
from benchmarks.latencies import NoTail, frozen
from benchmarks.population import C
from common.config_allocator import BudgetConfig, PatrRuleConfig, RuleConfig, UucbRuleConfig
from common.nouns import TaskId, Turn, TurnStatus, Version

START = Version(0, 0)
FAULTS = Faults(
    lost=0.01,
    duplicated=0.02,
    failed=0.02,
    declined=0.01,
    actor_life_s=60,
    actor_pause=0.002,
    learner_life_s=80,
)


def world(drift: float = 0.0) -> PopulationWorld:
    return PopulationWorld(C, NoTail(), drift)


def episode(there: PopulationWorld, prompt: int, seed: int, version: Version = START) -> list[Turn]:
    turns = [there.root(TaskId("c", "train", prompt))]
    while turns[-1].status is TurnStatus.OPEN:
        turns.append(there.sample(seed + len(turns), turns[-1].snapshot, version))
    return turns


def test_a_snapshot_carries_the_whole_state() -> None:
    state = C.root(7)
    for seed in range(12):
        assert _UNPACK.decode(pack(state)) == state
        if state.success is not None:
            break
        state = C.step(state, seed)
    assert state.success is not None and math.isinf(state.probit)


def test_a_turn_depends_on_its_seed_and_its_prefix_alone() -> None:
    assert episode(world(), 3, 100) == episode(world(), 3, 100) != episode(world(), 3, 101)


def test_only_the_last_turn_pays_and_ends_the_world() -> None:
    for prompt in range(20):
        *before, last = episode(world(), prompt, 50)
        assert all(turn.status is TurnStatus.OPEN and turn.reward == 0.0 for turn in before)
        assert last.status is TurnStatus.TERMINATED and last.reward in (0.0, 1.0)
        assert len(last.entropies) == len(last.action) == 4 * last.num_action_tokens


def test_the_learners_updates_move_every_prompt() -> None:
    def success(step: int) -> float:
        there = world(drift=0.1)
        ends = [episode(there, prompt, 1_000 * prompt, Version(0, step))[-1] for prompt in range(300)]
        return statistics.fmean(end.reward for end in ends)

    at_first, later = success(0), success(20)
    assert later > at_first + 0.1, "two probits more"


def test_a_root_without_a_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the snapshot"):
        world().sample(1, None, START)


def fleet(rule: RuleConfig, seed: int, faults: Faults = FAULTS) -> Fleet:
    settings = Settings(
        steps=4, batch_trees=3, max_policy_lag=1, max_score_staleness=8, lease_deadline_s=200.0
    )
    shape = FleetConfig(actors=5, slots=3, prefetch=0, step_s=1.0, commit_every=2, faults=faults)
    there = PopulationWorld(C, frozen(), drift=0.1)
    return Fleet(settings, shape, rule, BudgetConfig(continuations=8), seed, world=there)


@pytest.mark.parametrize(
    "rule", [UucbRuleConfig(), PatrRuleConfig(interval=2)], ids=["uucb", "patr, with horizons"]
)
def test_tails_failures_and_drift_lose_nothing(rule: RuleConfig) -> None:
    simulation = fleet(rule, 3)
    simulation.audit_every = 9
    result = simulation.run(max_events=30_000)
    assert result["ended"] and result["audit"] == []
    assert result["stats"]["trees/committed"] == 12
    assert result["stats"]["leases/failed"] > 0 and result["counts"]["actor_crashes"] > 0


def test_one_seed_is_one_history_with_tails_failures_and_drift() -> None:
    histories = [fleet(UucbRuleConfig(), seed).run(max_events=2_500)["history"] for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]


def test_horizons_are_reported_and_slots_that_run_are_counted() -> None:
    simulation = fleet(PatrRuleConfig(interval=2), 0, Faults())
    result = simulation.run(max_events=30_000)
    assert result["stats"]["leases/horizon"] > 0
    assert 0 < simulation.slot_seconds <= 15 * result["simulated_s"]
