"""What the tokens of trees grown level by level are paid, against a literal reading of the law.

A lease that ended at a horizon returns what its own turns earned and the mean return of its heirs; every token
is paid weight × (return of its lease − what was predicted before its turn). The trees come from the real core
under `patr` and `igrpo`, in a world that pays on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from common.config_allocator import IgrpoRuleConfig, PatrRuleConfig
from common.config_learner import CreditConfig, NodeWeight
from common.nouns import ROOT, Continuation, Tree, Version, ids
from learner.credit import CREDITS
from learner.credit.base import branch_reward, branch_turns, leaf_of, returns_by_owner
from learner.rows import Clock, RowCounts, build_rows
from tests.allocator.rules.level_search import LevelSearch, Run
from tests.allocator.rules.levels import LevelConfig, grow
from tests.learner.helpers import continuation, forked_tree

RULES: list[tuple[LevelConfig, int]] = [
    (PatrRuleConfig(interval=2, top_k=2, children=3, margin=0.25, repeats=3), 4),
    (IgrpoRuleConfig(gamma=4.0), 5),
    (IgrpoRuleConfig(max_levels=2), 5),
]
SEEDS = range(8)
IDS = ["patr", "igrpo", "igrpo-short"]
SETTINGS = CreditConfig()


@cache
def tree_of(rule: int, seed: int, faults: bool = False) -> tuple[Tree, list[Run]]:
    config, width = RULES[rule]
    tree, _ = grow(config, width, seed, 0, faults=faults)
    assert tree is not None
    return tree, LevelSearch(config, width, seed, faults=faults).tree(0, 0)


def paid_by_node(tree: Tree, credit: str, weight: NodeWeight) -> list[float]:
    """Advantage × weight summed over the rows of a tree, by node; here each turn has one action token."""
    rows = build_rows(
        tree, CREDITS[credit](tree, SETTINGS), weight, Clock(Version(0, 0), max_lag=0), RowCounts()
    )
    paid = [0.0] * len(tree.nodes)
    for row in rows:
        leaf = leaf_of(next(c for c in tree.continuations if c.number == row.continuation))
        place = len(ids(tree.nodes[ROOT].turn.observation))
        for node in tree.walk(leaf)[1:]:
            if place < row.length and row.trained[place]:
                paid[node.index] += float(row.advantages[place]) * float(row.weights[place])
            place += 1 + len(ids(node.turn.observation))
    return paid


def literal_return(runs: Sequence[Run], run: Run) -> float:
    """R(lease): its outcome, or own rewards + the mean over its heirs."""
    if run.reward is not None:
        return run.reward
    return run.earned + sum(literal_return(runs, runs[heir]) for heir in run.heirs) / len(run.heirs)


def literal_share(runs: Sequence[Run], run: Run) -> tuple[float, float]:
    """(weight, weight × return) of all outcomes that a lease leads to: what was dropped pays nothing."""
    if run.reward is not None:
        return run.weight, run.weight * run.reward
    shares = [literal_share(runs, runs[heir]) for heir in run.heirs]
    weight = sum(share[0] for share in shares)
    return weight, sum(share[1] for share in shares) + weight * run.earned


def predicted(run: Run, offset: int) -> float:
    value = run.values[offset - 1] if offset else run.baseline
    assert value is not None
    return value


@pytest.mark.parametrize("rule", range(3), ids=IDS)
def test_every_token_is_paid_the_return_of_the_lease_that_sampled_it(rule: int) -> None:
    heirs_seen = 0
    for seed in SEEDS:
        tree, runs = tree_of(rule, seed)
        paid = paid_by_node(tree, "granted", NodeWeight.GRANTED)
        for node in tree.nodes[1:]:
            run = runs[node.lease]
            expected = run.weight * (literal_return(runs, run) - predicted(run, node.offset))
            assert paid[node.index] == pytest.approx(expected, abs=1e-6), f"seed {seed}, {node.index}"
        heirs_seen += sum(len(run.heirs) > 1 and run.earned > 0 for run in runs)
    assert heirs_seen, "some lease earned something before it had several heirs"


@pytest.mark.parametrize("rule", range(3), ids=IDS)
def test_an_heir_that_was_dropped_pays_nothing_and_leaves_the_shares_of_the_others(rule: int) -> None:
    dropped = 0
    for seed in SEEDS:
        tree, runs = tree_of(rule, seed, faults=True)
        paid = paid_by_node(tree, "granted", NodeWeight.GRANTED)
        for node in tree.nodes[1:]:
            run = runs[node.lease]
            weight, returned = literal_share(runs, run)
            expected = returned - weight * predicted(run, node.offset)
            assert paid[node.index] == pytest.approx(expected, abs=1e-6)
        dropped += sum(run.ended.startswith("dropped") and run.heir_of >= 0 for run in runs)
    assert dropped


@pytest.mark.parametrize("rule", range(3), ids=IDS)
def test_the_core_learns_the_same_return_and_only_where_the_environment_said_all_of_it(rule: int) -> None:
    """Targets of the success predictor, before the tree is handed over."""
    known = 0
    for seed in SEEDS:
        _, rig = grow(*RULES[rule], seed, 0)
        _, runs = tree_of(rule, seed)
        certain = [run for run in runs if _environment_said_all(runs, run)]
        known += sum(run.reward is None for run in certain)
        assert rig.stat("predictor/censored") == len(runs) - len(certain)
        opened = sum(value is not None for run in certain for value in run.values)
        assert rig.stat("predictor/targets") == len(certain) + opened
        total = 0.0
        for run in certain:
            outcome, terms = min(1.0, max(0.0, literal_return(runs, run))), [run.baseline, *run.values]
            total += sum((value - outcome) ** 2 for value in terms if value is not None)
        if certain:
            assert rig.stat("predictor/brier") == pytest.approx(total / (len(certain) + opened))
    assert known, "some lease with heirs is a target"


def _environment_said_all(runs: Sequence[Run], run: Run) -> bool:
    if run.ended == "horizon":
        return all(_environment_said_all(runs, runs[heir]) for heir in run.heirs)
    return run.ended == "finished"


@pytest.mark.parametrize("rule", range(3), ids=IDS)
def test_grpo_compares_what_whole_branches_earned_from_the_prompt_on(rule: int) -> None:
    for seed in SEEDS:
        tree, runs = tree_of(rule, seed)
        leaves = [run for run in runs if run.reward is not None]
        earned = [
            (run.reward or 0.0) + sum(made.reward for made in run.path[: len(run.path) - run.own])
            for run in leaves
        ]
        mean, std = float(np.mean(earned)), float(np.std(earned, ddof=1))
        for run, credit, total in zip(leaves, CREDITS["grpo"](tree, SETTINGS), earned, strict=True):
            assert credit.continuation.number == run.number
            expected = (total - mean) / (std + SETTINGS.epsilon)
            assert credit.advantages == pytest.approx((expected,) * len(run.path))


@pytest.mark.parametrize("weight", NodeWeight)
@pytest.mark.parametrize("rule", range(3), ids=IDS)
def test_tokens_weigh_the_planned_weight_of_their_lease(rule: int, weight: NodeWeight) -> None:
    """Paths of a level share nothing but with their heirs: here all choices of `node_weight` but one agree."""
    for seed in SEEDS:
        tree, runs = tree_of(rule, seed)
        credits = CREDITS["granted"](tree, SETTINGS)
        assert math.fsum(credit.weight for credit in credits) == pytest.approx(tree.planned_weight)
        rows = build_rows(tree, credits, weight, Clock(Version(0, 0), max_lag=0), RowCounts())
        worth = [0.0] * len(tree.nodes)
        through = [0] * len(tree.nodes)
        for credit, row in zip(credits, rows, strict=True):
            place = len(ids(tree.nodes[ROOT].turn.observation))
            for node in credit.turns:
                worth[node.index] += float(row.weights[place])
                through[node.index] += 1
                place += 1 + len(ids(node.turn.observation))
        for node in tree.nodes[1:]:
            shared = through[node.index] if weight is NodeWeight.ONCE else 1
            assert worth[node.index] == pytest.approx(runs[node.lease].weight / shared, rel=1e-5)


# ------------------------------------------------------------------------------------------------- alone


def test_a_fork_is_paid_from_its_anchor_on_and_the_branch_above_it_for_what_came_before() -> None:
    tree = forked_tree()
    owner, fork = tree.continuations
    assert returns_by_owner(branch_turns(tree, fork), fork) == {1: 0.0, 0: 0.0}
    assert returns_by_owner(branch_turns(tree, owner), owner) == {0: 1.0}
    assert branch_reward(branch_turns(tree, owner), owner) == 1.0


def test_a_continuation_without_an_outcome_has_no_return() -> None:
    alone: Continuation = continuation(3, [], None)
    with pytest.raises(ValueError, match="continuation 3 has no outcome"):
        returns_by_owner((), alone)
