"""Scores that a decision has not seen: what may start on old ones, what is revoked, and what comes of that."""

from __future__ import annotations

import pytest

from common.messages import Expanded, Failed, Finished, Revoke, TreeReady
from common.nouns import Lease
from tests.allocator.harness import LEARNER, RANDOM, Rig, granted, ready, small, turn, win


def speculating(**changes: int) -> tuple[Rig, str, list[Lease], list[Lease]]:
    """One tree whose chains have made a turn each, and the round that was decided before they end."""
    rig, actor, chains = granted(small(batch_trees=1, **changes), RANDOM, continuations=6, slots=16)
    for lease in chains:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    return rig, actor, chains, rig.leases(actor)


def test_a_rule_that_reads_nothing_is_never_throttled_and_never_speculative() -> None:
    rig, _actor, leases = granted()
    assert len(leases) == 4 and rig.stat("leases/speculative_share") == 0


def test_without_staleness_a_round_waits_until_all_chains_have_ended() -> None:
    rig, actor = ready(rule=RANDOM, continuations=6, slots=16)
    rig.inspect(actor)
    chains = [lease for lease in rig.leases(actor) if lease.id.tree == 0]
    assert len(chains) == 2
    rig.finish(actor, chains[0])
    assert not rig.leases(actor)
    rig.finish(actor, chains[1])
    assert len(rig.leases(actor)) == 4
    assert rig.stat("leases/speculative_share") == 0


def test_with_staleness_a_round_may_be_speculative_and_a_lease_too_old_at_its_start_is_revoked() -> None:
    rig, actor, chains, round_one = speculating(max_score_staleness=3)
    assert len(round_one) == 4  # 2 outstanding of another decision, D = 3
    assert rig.start(actor, round_one[0]).ack
    rig.expand(actor, chains[0], 1)
    rig.start(actor, round_one[1])  # one event since, 2 outstanding: age 3, just young enough
    rig.expand(actor, chains[0], 2)
    rig.start(actor, round_one[2])  # age 4
    assert [r.lease for r in rig.take(actor, Revoke)] == [round_one[2].id]
    assert rig.stat("events/too_old") == 1 and rig.stat("leases/score_age_max") == 3
    rig.say(actor, Expanded(round_one[2].id, 0, turn(round_one[2], 0)))
    assert rig.stat("events/crossed") == 1  # discarded, whatever it was


def test_a_started_lease_is_never_revoked_for_its_age_not_even_when_it_is_tried_again() -> None:
    rig, actor, chains, round_one = speculating(max_score_staleness=3)
    rig.start(actor, round_one[0])
    for offset in range(1, 4):
        rig.expand(actor, chains[0], offset)
    rig.say(actor, Failed(round_one[0].id, "env", True))
    again = [lease for lease in rig.leases(actor) if lease.id.number == round_one[0].id.number]
    assert [lease.id.epoch for lease in again] == [1]
    rig.start(actor, again[0])
    assert rig.stat("events/too_old") == 0 and rig.stat("leases/running") == 3


def test_a_revoked_lease_gives_its_budget_back_and_the_rule_decides_anew() -> None:
    rig, actor, chains, old = speculating(steps=1, max_score_staleness=2)
    rig.expand(actor, chains[0], 1)
    for lease in old:
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "revoked", False))
    for lease in chains:
        last = len(rig.core.state.forest.trees[0].branches[lease.id.number].nodes)
        rig.expand(actor, lease, last, last=True)
        rig.say(actor, Finished(lease.id, last + 1, win()))
    assert rig.work(actor) == 4
    (tree,) = rig.take(LEARNER, TreeReady)
    assert [c.number for c in tree.tree.continuations] == [0, 1, 6, 7, 8, 9]
    assert tree.tree.planned_weight == pytest.approx(1.0)
