"""The rules in a simulated fleet with faults, at every D: trees end, budgets hold, and D = 0 never speculates."""

from __future__ import annotations

import pytest

from allocator.settings import Settings
from benchmarks.fleet import Faults, Fleet, FleetConfig
from common.config_allocator import (
    BudgetConfig,
    EntropyRuleConfig,
    RuleConfig,
    TraceRuleConfig,
    UucbRuleConfig,
)

FAULTY = Faults(
    lost=0.02, duplicated=0.02, reordered=0.02, failed=0.03, declined=0.01, actor_life_s=40, actor_pause=0.005,
    learner_life_s=60, tree_stale=0.05,
)  # fmt: skip
RULES = {
    "arpo": EntropyRuleConfig(initial=3),
    "at2po": EntropyRuleConfig(form="at2po", initial=3, beam=2),
    "trace": TraceRuleConfig(per_root=1),
    "uucb": UucbRuleConfig(),
    "contrast": UucbRuleConfig(potential="contrast"),
}


def fleet(rule: RuleConfig, staleness: int, seed: int = 0, continuations: int = 7) -> Fleet:
    settings = Settings(
        steps=4, batch_trees=3, max_policy_lag=1, max_score_staleness=staleness, lease_deadline_s=12.0
    )
    shape = FleetConfig(actors=5, slots=3, prefetch=2, step_s=1.0, commit_every=2, faults=FAULTY)
    return Fleet(settings, shape, rule, BudgetConfig(continuations=continuations), seed)


@pytest.mark.parametrize("staleness", [0, 6, 1000])
@pytest.mark.parametrize("name", RULES)
def test_a_faulty_fleet_comes_to_its_end_within_its_bounds(name: str, staleness: int) -> None:
    simulation = fleet(RULES[name], staleness)
    simulation.audit_every = 11
    result = simulation.run(max_events=20_000)
    stats = result["stats"]
    assert result["ended"] and result["audit"] == []
    assert stats["trees/committed"] == 12
    assert simulation.core.state.forest.oldest_score <= staleness
    assert (simulation.core.state.forest.speculative > 0) is (staleness > 0)
