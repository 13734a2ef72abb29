"""Whole simulated fleets: one seed is one history, faults lose nothing, a thousand actors are no burden."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from allocator.settings import Settings
from benchmarks import allocator_fleet
from benchmarks.fleet import Faults, Fleet, FleetConfig, SimActor
from common.config_allocator import BudgetConfig, RandomRuleConfig, RuleConfig

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTY = Faults(
    lost=0.02, duplicated=0.02, reordered=0.02, failed=0.02, declined=0.01, actor_life_s=40, actor_pause=0.005,
    learner_life_s=30, tree_stale=0.05,
)  # fmt: skip


def fleet(seed: int, rule: RuleConfig | None = None, faults: Faults = FAULTY, **changes: Any) -> Fleet:
    """Six updates of four trees by six actors."""
    bounds = {"max_policy_lag": 1, "max_score_staleness": 2, "lease_deadline_s": 12.0} | changes
    settings = Settings(steps=6, batch_trees=4, **bounds)
    shape = FleetConfig(actors=6, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=faults)
    return Fleet(settings, shape, rule or RandomRuleConfig(), BudgetConfig(continuations=6), seed)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", [RuleConfig(), RandomRuleConfig()], ids=["flat", "random"])
def test_a_faulty_fleet_comes_to_its_end_with_every_tree_accounted_for(seed: int, rule: RuleConfig) -> None:
    simulation = fleet(seed, rule)
    simulation.audit_every = 7
    result = simulation.run(max_events=20_000)
    stats = result["stats"]
    assert result["ended"] and result["audit"] == []
    assert stats["trees/committed"] == 24
    assert stats["trees/opened"] == 24 + stats["trees/dropped"]
    assert stats["leases/issued"] == sum(stats[f"leases/{k}"] for k in ENDINGS)


ENDINGS = (
    "finished",
    "horizon",
    "failed",
    "expired",
    "declined",
    "revoked",
    "fenced",
    "dropped",
    "run_ended",
)


def test_the_faults_of_the_simulation_do_happen() -> None:
    total: dict[str, float] = {}
    for seed in range(4):
        result = fleet(seed).run(max_events=20_000)
        for name, count in {**result["stats"], **result["counts"]}.items():
            total[name] = total.get(name, 0) + count
    for name in (
        "leases/failed", "leases/expired", "leases/declined", "leases/revoked", "leases/fenced", "actor_crashes",
        "learner_crashes", "pauses", "events/gaps", "events/duplicates", "events/fenced", "events/superseded",
        "events/silent_peers", "events/revived_peers", "events/too_old", "trees/dropped/stale",
    ):  # fmt: skip
        assert total.get(name, 0) > 0, f"{name} never happened"


def test_one_seed_is_one_history() -> None:
    histories = [fleet(seed).run(max_events=3000)["history"] for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]


def test_the_history_does_not_depend_on_the_hashing_of_strings() -> None:
    """No set of strings is walked through in the core: another process has the same history."""
    code = (
        "import json; from tests.allocator.test_fleet import fleet; "
        "print(json.dumps(fleet(3).run(max_events=3000)['history']))"
    )
    found = {fleet(3).run(max_events=3000)["history"]}
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        found.add(json.loads(done.stdout))
    assert len(found) == 1


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_no_score_is_older_than_its_bound_when_a_lease_starts(staleness: int) -> None:
    for seed in range(3):
        stats = fleet(seed, max_score_staleness=staleness).run(max_events=20_000)["stats"]
        assert stats["leases/score_age_max"] <= staleness
        assert (stats["leases/speculative_share"] > 0) == (staleness > 0)


def test_a_late_actor_gets_work_within_five_seconds_of_its_hello() -> None:
    """Three actors with a deep prefetch hold all there is; a fourth joins."""
    settings = Settings(steps=50, batch_trees=4, max_policy_lag=0, max_score_staleness=4)
    shape = FleetConfig(actors=3, slots=2, prefetch=30, turn_s=4.0)
    simulation = Fleet(settings, shape, RuleConfig(), BudgetConfig(continuations=8), seed=5)
    simulation.run(max_seconds=20)
    late = SimActor(simulation, "late", 0)
    late.join()
    simulation.run(max_seconds=25)
    assert late.running, "it runs a lease"


def test_a_thousand_actors_in_twenty_thousand_events() -> None:
    result = allocator_fleet.run(20_000)
    assert result["audit"] == [] and result["stats"]["peers/actors"] > 950
    assert 20_000 / result["cpu_seconds"] > 4_000, "half of what is promised, on any machine"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_thousand_actors_pass_a_million_events_and_the_law_holds() -> None:
    result = allocator_fleet.run(1_000_000)
    assert result["audit"] == [] and result["events"] >= 1_000_000
