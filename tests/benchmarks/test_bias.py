"""The predictable-weight law, by enumeration; and that the measurement sees a bias where there is one."""

from __future__ import annotations

import msgspec
import pytest

import benchmarks.bias as bias
from benchmarks.bias import ARMS, Arm, Gradient, expectations, expected_gradient, run_gradient, taught
from benchmarks.tabular import EnumeratedForest, World
from common.config_learner import NodeWeight
from common.nouns import Tree

NONE = 1e-6
"""Rows hold single precision."""


def arm(name: str) -> Arm:
    return next(item for item in ARMS if item.name == name)


@pytest.mark.parametrize("predictor", ["history", "shared"])
@pytest.mark.parametrize("item", ARMS, ids=lambda item: item.name)
def test_granted_has_no_bias_for_the_objective_that_is_run(item: Arm, predictor: str) -> None:
    totals = expectations(
        item,
        taught(predictor),
        {
            "granted": lambda tree, world: expected_gradient(tree, world, "granted", NodeWeight.GRANTED),
            "vtrace": lambda tree, world: expected_gradient(tree, world, "tree_vtrace", NodeWeight.GRANTED),
            "run": run_gradient,
            "environment": bias.environment_gradient,
        },
    )
    assert bias.bias(totals["granted"], totals["run"], scaled=False) < NONE
    assert bias.bias(totals["vtrace"], totals["run"], scaled=False) < NONE, "on policy it is Monte-Carlo"
    apart = bias.bias(totals["run"], totals["environment"], scaled=False)
    if item.rule.name in ("patr", "igrpo"):
        assert apart > 0.01, "they stop paths: their objective is not the environment's"
    else:
        assert apart < NONE


def test_the_baselines_of_these_arms_are_not_all_zero_or_equal() -> None:
    """Else an unbiased gradient would say nothing about them."""
    for predictor in ("history", "shared"):
        seen = set()

        def look(tree: Tree, world: World, seen: set[float] = seen) -> Gradient:
            seen.update(c.baseline for c in tree.continuations if c.baseline is not None)
            return {}

        expectations(arm("random"), taught(predictor), {"": look})
        assert len(seen) > 1 and 0.0 not in seen


def realised(tree: Tree) -> Tree:
    """Weights by how many continuations came about: known afterwards only."""
    share = 1.0 / len(tree.continuations)
    reward = sum(c.outcome.reward for c in tree.leaves() if c.outcome is not None)
    changed = [msgspec.structs.replace(c, weight=share * (1.0 + reward)) for c in tree.continuations]
    return msgspec.structs.replace(tree, continuations=changed)


def averaged(tree: Tree) -> Tree:
    """Baselines of the mean over all outcomes, its own among them."""
    outcomes = [c.outcome.reward for c in tree.leaves() if c.outcome is not None]
    mean = sum(outcomes) / len(outcomes)
    changed = [msgspec.structs.replace(c, baseline=mean) for c in tree.continuations]
    return msgspec.structs.replace(tree, continuations=changed)


@pytest.mark.parametrize("wrong", [realised, averaged])
@pytest.mark.parametrize("name", ["random", "uucb", "trace"])
def test_weights_and_baselines_that_know_the_outcome_are_seen(name: str, wrong: object) -> None:
    item = arm(name)
    totals = expectations(
        item,
        taught("history"),
        {
            "wrong": lambda tree, world: expected_gradient(wrong(tree), world, "granted", NodeWeight.GRANTED),  # type: ignore[operator]
            "run": run_gradient,
        },
    )
    assert bias.bias(totals["wrong"], totals["run"], scaled=True) > 0.01


def test_the_published_estimators_are_biased_where_branching_looks_at_outcomes() -> None:
    rows = bias.measure(arm("uucb, running"), "history")
    for credit in ("grpo", "dr_grpo", "rloo", "edge"):
        assert bias.greatest(rows, credit) > 0.01, credit
    assert bias.greatest(rows, "granted") < NONE


def test_without_branching_leaving_one_out_has_no_bias_and_a_plain_mean_only_a_smaller_scale() -> None:
    estimates = {
        credit: (
            lambda tree, world, credit=credit: expected_gradient(tree, world, credit, NodeWeight.GRANTED)
        )
        for credit in ("rloo", "edge", "dr_grpo")
    }
    totals = expectations(arm("flat"), taught("history"), {**estimates, "run": run_gradient})  # type: ignore[dict-item]
    run = totals["run"]
    assert bias.bias(totals["rloo"], run, scaled=False) < NONE
    assert bias.bias(totals["edge"], run, scaled=False) < NONE
    # Of three branches the mean holds a third of the branch itself.
    assert bias.bias(totals["dr_grpo"], run, scaled=False) == pytest.approx(1 / 3, abs=1e-5)
    assert bias.bias(totals["dr_grpo"], run, scaled=True) < NONE


def test_a_tree_of_which_something_was_not_enumerated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bias, "enumerate_all", lambda process: iter([(0.5, object())]))
    monkeypatch.setattr(EnumeratedForest, "plant", lambda self, chooser: None)
    with pytest.raises(RuntimeError, match=r"sum to 0\.5"):
        expectations(arm("flat"), taught("history"), {})
