"""Branch rules and budgets alone, and a toy rule that uses what no rule of this release does: horizons."""

from __future__ import annotations

from collections import Counter

import pytest

from allocator.budgets import make_budget
from allocator.rules import NAMES, make_rule
from allocator.rules.base import COMPLETE, WAIT, Decision, EventKind, Pick, Rule, Stop, TreeView
from allocator.tree import GrowingTree
from common.config_allocator import (
    BUDGET_SCHEMAS,
    BUDGETS,
    RULE_SCHEMAS,
    RULES,
    BudgetConfig,
    EntropyRuleConfig,
    RandomRuleConfig,
    RuleConfig,
)
from common.errors import ConfigError
from common.messages import Failed, Finished, HorizonReached, TreeReady
from common.nouns import NO_LEASE, ROOT, Ending, RewardSource
from common.prefix import Prefix
from tests.allocator.harness import LEARNER, Rig, granted, ready, small, win


def test_the_registries_offer_what_the_configuration_allows() -> None:
    assert NAMES == RULES and [make_rule(schema()).name for schema in RULE_SCHEMAS.values()] == list(RULES)
    assert [make_budget(schema()).name for schema in BUDGET_SCHEMAS.values()] == list(BUDGETS)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'flat'"):
        make_rule(RuleConfig(name="flatt"))
    with pytest.raises(ConfigError, match="did you mean 'fixed'"):
        make_budget(BudgetConfig(name="fixd"))


# ----------------------------------------------------------------------------------------------- random


def grown(
    chains: int = 2, expansions: int = 2, continuations: int = 6, turns: int = 3
) -> tuple[Rig, GrowingTree]:
    """A tree whose chains have all ended, just before its first round."""
    rule = RandomRuleConfig(chains=chains, expansions=expansions)
    rig, actor, heads = granted(small(batch_trees=1), rule, continuations, slots=64)
    assert len(heads) == chains
    for lease in heads:
        rig.finish(actor, lease, turns)
    return rig, rig.core.state.forest.trees[0]


def test_a_chain_expands_only_what_belongs_to_its_own_tree() -> None:
    for tree in (grown(expansions=20, continuations=42)[1] for _ in range(1)):
        for branch in list(tree.branches.values())[2:]:
            owner = tree.nodes[branch.anchor].lease
            assert owner in (NO_LEASE, branch.group)


def test_draws_are_uniform_over_root_and_non_leaf_turns_with_replacement() -> None:
    """Chains of three turns: the root and two open turns, a third each."""
    _, tree = grown(chains=2, expansions=600, continuations=2 + 1200)
    drawn = Counter(branch.anchor for branch in list(tree.branches.values())[2:])
    leaves = {branch.nodes[-1] for branch in list(tree.branches.values())[:2]}
    assert not leaves & drawn.keys()
    for chain in range(2):
        of_chain = [b.anchor for b in tree.branches.values() if b.group == chain and b.decision == 1]
        counts = Counter(of_chain)
        assert len(counts) == 3
        chi_square = sum((n - 200) ** 2 / 200 for n in counts.values())
        assert chi_square < 13.8  # 0.1 % of chance, and the seed is fixed


def test_a_chain_that_ended_with_its_first_turn_is_expanded_from_the_root() -> None:
    _, tree = grown(turns=1)
    assert all(branch.anchor == ROOT for branch in tree.branches.values())


def test_rounds_follow_each_other_and_every_chain_gets_the_same_number() -> None:
    rig, tree = grown(continuations=10)
    rig.work("a/1")
    decisions = Counter((b.decision, b.group) for b in tree.branches.values())
    assert decisions == {(0, 0): 1, (0, 1): 1, (1, 0): 2, (1, 1): 2, (2, 0): 2, (2, 1): 2}
    assert len(rig.take(LEARNER, TreeReady)) == 1


# -------------------------------------------------------------------------------------- horizons, stops


class Levels(Rule):
    """A level-synchronous toy: two paths for one turn each, the first goes on as two heirs, the other stops."""

    name = "levels"
    reads = frozenset({EventKind.SCORE})

    def decide(self, view: TreeView) -> Decision:
        if not view.branches:
            return Decision(picks=(Pick(ROOT, horizon=1), Pick(ROOT, horizon=1)))
        first, second = view.branches[0], view.branches[1]
        if not (first.ended and second.ended):
            return WAIT
        if len(view.branches) > 2:
            return COMPLETE if all(b.ended for b in view.branches.values()) else WAIT
        heirs = tuple(Pick(first.nodes[-1], heir_of=0) for _ in range(2))
        return Decision(picks=heirs, stops=(Stop(1, 0.25),))


def test_heirs_share_the_weight_of_the_path_they_continue_and_cost_no_budget() -> None:
    rig, actor, level = granted(small(batch_trees=1, steps=1), Levels(), slots=8)
    assert [lease.horizon for lease in level] == [1, 1]
    for lease in level:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
        assert not rig.leases(actor)
        assert rig.say(actor, HorizonReached(lease.id, 1)).ack
    heirs = rig.leases(actor)
    assert [(h.weight, h.depth, h.horizon) for h in heirs] == [(0.25, 1, 0)] * 2
    for lease, reward in zip(heirs, (1.0, 0.0), strict=True):
        rig.finish(actor, lease, 2, reward)
    (tree,) = [m.tree for m in rig.take(LEARNER, TreeReady)]
    ends = [(c.ended, c.heir_of, c.weight) for c in tree.continuations]
    assert ends == [
        ("horizon", -1, 0.5), ("stopped", -1, 0.5), ("finished", 0, 0.25), ("finished", 0, 0.25),
    ]  # fmt: skip
    stopped = tree.continuations[1].outcome
    assert stopped is not None
    assert (stopped.source, stopped.ending) == (RewardSource.PRUNE_RULE, Ending.PRUNED)
    assert tree.planned_weight == 1.0


def test_the_return_at_a_horizon_is_that_of_the_heirs_and_a_stopped_path_is_no_target() -> None:
    rig, actor, level = granted(small(batch_trees=1, steps=1), Levels(), slots=8)
    for lease in level:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
        rig.say(actor, HorizonReached(lease.id, 1))
    tree = rig.core.state.forest.trees[0]
    for lease, reward in zip(rig.leases(actor), (1.0, 0.0), strict=True):
        rig.finish(actor, lease, 2, reward)
    targets, censored = tree.targets()
    assert censored == 1
    assert [(t.prefix.depth, t.outcome) for t in targets] == [
        (0, 0.5), (1, 0.5),  # the path to the horizon: its anchor and its open turn
        (1, 1.0), (2, 1.0),  # each heir from its own anchor down, never above
        (1, 0.0), (2, 0.0),
    ]  # fmt: skip


class Scripted(Rule):
    """Two paths for one turn each, then one decision after the other from a list."""

    name = "scripted"
    reads = frozenset({EventKind.OUTCOME})

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)

    def decide(self, view: TreeView) -> Decision:
        if not view.branches:
            return Decision(picks=(Pick(ROOT, horizon=1), Pick(ROOT, horizon=1)))
        if not (view.branches[0].ended and view.branches[1].ended):
            return WAIT
        return self.decisions.pop(0) if self.decisions else WAIT


def at_the_horizon(rule: Rule) -> Rig:
    """Both paths wait at their horizons, the second for the last word of its actor."""
    bounds = small(batch_trees=1, steps=1, max_score_staleness=9)
    rig, actor, (first, second) = granted(bounds, rule, slots=8)
    for lease in (first, second):
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    rig.say(actor, HorizonReached(first.id, 1))
    rig.check_law = False  # what follows is a rule's bug
    rig.say(actor, HorizonReached(second.id, 1))
    return rig


HEIRS = Decision(picks=(Pick(1, heir_of=0), Pick(1, heir_of=0)))


@pytest.mark.parametrize(
    "decisions, words",
    [
        ((HEIRS, HEIRS), r"gives heirs to lease 0 of tree 0, which has the heirs \[2, 3\] already"),
        ((HEIRS, Decision(stops=(Stop(0, 0.0),))), r"stops lease 0 of tree 0, which has the heirs \[2, 3\]"),
        ((Decision(HEIRS.picks, (Stop(0, 0.0),)),), "gives heirs to lease 0 of tree 0, which is stopped"),
        ((HEIRS, Decision((Pick(1, heir_of=2),))), "gives heirs to lease 2 of tree 0, which is outstanding"),
    ],
)  # fmt: skip
def test_a_path_that_waits_at_its_horizon_is_answered_once(
    decisions: tuple[Decision, ...], words: str
) -> None:
    """A second set of heirs would weigh its parent twice."""
    with pytest.raises(RuntimeError, match=f"rule 'scripted' {words}"):
        at_the_horizon(Scripted(*decisions))


def test_a_stop_is_an_outcome_to_the_clock() -> None:
    """Whoever decided before it did not see it; the decision that stops has."""
    heirs, stop = Decision((Pick(1, heir_of=0),)), Stop(1, 0.25)
    for decisions, age in (((heirs, Decision(stops=(stop,))), 1), ((Decision(heirs.picks, (stop,)),), 0)):
        forest = at_the_horizon(Scripted(*decisions)).core.state.forest
        tree = forest.trees[0]
        assert tree.branches[1].ended == "stopped"
        assert (forest.clock(tree), forest.age(tree.branches[2])) == (1, age)


def test_a_rule_that_waits_for_nothing_is_noticed_at_once() -> None:
    class Sleeper(Rule):
        name = "sleeper"
        reads: frozenset[EventKind] = frozenset()

        def decide(self, view: TreeView) -> Decision:
            return WAIT

    rig, actor = ready(rule=Sleeper())
    with pytest.raises(RuntimeError, match="'sleeper' waits in tree 0"):
        rig.inspect(actor)


# ---------------------------------------------------------------------------------------------- targets


def test_one_target_per_continuation_at_its_anchor_and_below_never_above() -> None:
    """The owner's turns are not averaged with the branches that others chose by its outcome."""
    rig, tree = grown()
    actor = "a/1"
    for lease in rig.leases(actor):
        rig.finish(actor, lease, 2, reward=0.0)
    by_owner: Counter[tuple[int, float]] = Counter()
    targets, _ = tree.targets()
    for t in targets:
        by_owner[t.prefix.depth, t.outcome] += 1
    heads, others = list(tree.branches.values())[:2], list(tree.branches.values())[2:]
    assert len(targets) == sum(1 + len(b.nodes) - 1 for b in tree.branches.values())
    assert by_owner[0, 1.0] == len(heads)
    assert by_owner[0, 0.0] == sum(b.anchor == ROOT for b in others)


def test_a_continuation_that_says_nothing_is_censored_in_a_tree_that_is_dropped_too() -> None:
    rig, actor, leases = granted(small(batch_trees=1, steps=1), continuations=3)
    for lease in leases:
        rig.start(actor, lease)
        rig.say(actor, Failed(lease.id, "broken", False))
    assert rig.stat("trees/dropped/no_outcome") == 1 and rig.stat("predictor/censored") == 3
    rig.inspect(actor)
    for number, lease in enumerate(rig.leases(actor)):
        rig.start(actor, lease)
        if number:
            rig.say(actor, Failed(lease.id, "broken", False))
        else:
            rig.finish(actor, lease)
    assert rig.stat("predictor/censored") == 5 and rig.stat("predictor/targets") == 2


def test_predictions_enter_between_waves_in_any_order_of_completion() -> None:
    tables = []
    for order in (0, 1):
        rig, actor, leases = granted(small(steps=3, batch_trees=2, max_policy_lag=2), slots=64)
        by_wave = [[x for x in leases if x.id.tree // 2 == w] for w in range(3)]
        waves = (1, 0, 2) if order else (0, 1, 2)
        for number, wave in enumerate(waves):
            for lease in reversed(by_wave[wave]) if order else by_wave[wave]:
                rig.finish(actor, lease, 1 + lease.seed % 3, reward=float(lease.seed & 1))
            expected = {0: (1, 0)[order], 1: 2, 2: 3}[number]
            assert rig.core.state.predictor.version == expected
        tables.append([rig.core.state.predictor.predict(Prefix(d)) for d in range(5)])
    assert tables[0] == tables[1]


def test_the_pinned_version_gives_the_values_of_later_turns() -> None:
    """A lease granted before a wave entered keeps the baselines it was granted with."""
    rig, actor, leases = granted(small(steps=3, batch_trees=1, max_policy_lag=1), slots=64)
    old = [lease for lease in leases if lease.id.tree == 1]
    for lease in old:
        rig.start(actor, lease)
        rig.expand(actor, lease, 0)
    for lease in leases:
        if lease.id.tree == 0:
            rig.finish(actor, lease, 3, reward=1.0)
    assert rig.core.state.predictor.version == 1
    for lease in old:
        rig.expand(actor, lease, 1)
    nodes = rig.core.state.forest.trees[1].nodes
    assert [nodes[i].value for i in range(5)] == [0.5] * 5
    assert [nodes[i].value_version for i in range(1, 5)] == [0] * 4
    for lease in old:
        rig.expand(actor, lease, 2, last=True)
        rig.say(actor, Finished(lease.id, 3, win()))
    rig.consume([0], 1)
    rig.inspect(actor)
    new = rig.leases(actor)
    assert new and new[0].baseline > 0.6 and new[0].predictor_version == 2


def test_a_rule_that_needs_entropies_ends_the_run_with_a_sentence_where_there_are_none() -> None:
    rig, actor, (lease,) = granted(small(batch_trees=1), EntropyRuleConfig(initial=1), 3)
    rig.start(actor, lease)
    rig.expand(actor, lease, 0)
    assert rig.core.ending is not None and rig.core.ending.code == 2
    assert "allocator.rule=entropy needs the entropies of every turn" in rig.core.ending.reason
