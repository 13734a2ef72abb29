"""Contrast and its cost, against literal counting on trees small enough to count by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.contrast import Sums, add, measure, mixture
from common.nouns import (
    NO_LEASE,
    NO_PARENT,
    Continuation,
    Ending,
    Node,
    Outcome,
    RewardSource,
    TaskId,
    Tree,
    Turn,
    TurnStatus,
    Version,
)

Spec = tuple[int, int, float | None]
"""Anchor, turns, and reward of a continuation; None = it waited at a horizon."""


def grown(*specs: Spec, source: RewardSource = RewardSource.ENVIRONMENT, heir_of: int = NO_LEASE) -> Tree:
    """A tree by its continuations, turns of two tokens each; nodes in the order they are listed."""
    nodes = [Node(0, NO_PARENT, NO_LEASE, 0, 0, Turn())]
    continuations = []
    for number, (anchor, turns, reward) in enumerate(specs):
        mine, parent = [], anchor
        for offset in range(turns):
            status = TurnStatus.OPEN if offset < turns - 1 or reward is None else TurnStatus.TERMINATED
            turn = Turn(action=b"\0" * 8, status=status)
            nodes.append(Node(len(nodes), parent, number, offset, nodes[parent].depth + 1, turn))
            parent = len(nodes) - 1
            mine.append(parent)
        outcome = None if reward is None else Outcome(reward, reward, source, Ending.TERMINATED)
        continuations.append(
            Continuation(
                number=number,
                anchor=anchor,
                nodes=mine,
                weight=1.0,
                baseline=0.5,
                predictor_version=0,
                score_stamp=0,
                speculative=False,
                heir_of=heir_of,
                outcome=outcome,
                ended="finished",
            )
        )
    return Tree(0, TaskId("a", "train", 0), 0, nodes, continuations, 1.0, Version(0, 0))


def test_a_flat_tree_with_one_success_in_four_has_the_contrast_of_its_definition() -> None:
    sums = measure(grown((0, 2, 1.0), (0, 1, 0.0), (0, 3, 0.0), (0, 2, 0.0)))
    assert (sums.leaves, sums.tokens, sums.successes, sums.mixed) == (4, 16, 1, 1)
    assert sums.mass == pytest.approx(2 * math.sqrt(0.25 * 0.75))
    assert (sums.contrasting, sums.groups, sums.mixed_groups) == (4, 1, 1)
    ratios = sums.ratios()
    assert ratios["contrast"] == ratios["mixed"] == ratios["anchor_contrast"] == 1


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_tree_whose_outcomes_are_all_alike_has_none(reward: float) -> None:
    sums = measure(grown((0, 1, reward), (0, 2, reward), (0, 1, reward)))
    assert (sums.mixed, sums.mass, sums.contrasting, sums.mixed_groups) == (0, 0, 0, 0)
    assert (sums.leaves, sums.groups) == (3, 1)


def test_the_owner_of_a_prefix_meets_the_continuations_that_started_there() -> None:
    failed = grown((0, 3, 0.0), (1, 2, 1.0))
    sums = measure(failed)
    assert (sums.groups, sums.mixed_groups) == (1, 1), "only one outcome started at the root"
    alike = measure(grown((0, 3, 0.0), (1, 2, 0.0), (0, 1, 1.0)))
    assert (alike.groups, alike.mixed_groups, alike.mixed) == (2, 1, 1)


def test_a_path_that_waited_at_a_horizon_is_no_leaf_and_its_heirs_meet_where_they_started() -> None:
    sums = measure(grown((0, 2, None), (2, 1, 1.0), (2, 1, 0.0)))
    assert (sums.leaves, sums.known, sums.groups, sums.mixed_groups) == (2, 2, 1, 1)


def test_what_a_rule_says_of_a_path_is_no_outcome_but_was_sampled_all_the_same() -> None:
    stopped = measure(grown((0, 1, 1.0), (0, 1, 0.0), source=RewardSource.PRUNE_RULE))
    assert (stopped.leaves, stopped.known, stopped.mixed) == (2, 0, 0)
    guessed = measure(grown((0, 1, 0.9), (0, 1, 0.1), source=RewardSource.PSEUDO_REWARD))
    assert (guessed.leaves, guessed.known, guessed.mixed, guessed.tokens) == (2, 0, 0, 4)
    assert guessed.ratios()["contrast"] == 0


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6))
def test_sums_over_trees_are_what_counting_each_continuation_gives(groups: list[list[bool]]) -> None:
    total = add(measure(grown(*((0, 1, float(won)) for won in group))) for group in groups)
    wasted = sum(len(group) for group in groups if len(set(group)) == 1)
    every = sum(len(group) for group in groups)
    ratios = total.ratios()
    assert ratios["contrast"] == pytest.approx(1 - wasted / every)
    assert ratios["mixed"] == pytest.approx(sum(len(set(group)) == 2 for group in groups) / len(groups))
    advantages = 0.0
    for group in groups:
        mean = sum(group) / len(group)
        std = math.sqrt(mean * (1 - mean))
        advantages += sum(abs(won - mean) / std for won in group) / len(group) if std else 0.0
    assert ratios["rifb"] == pytest.approx(advantages / len(groups)), "the mean |advantage| of a z-score"


def test_a_mixture_has_the_stated_share_of_prompts_of_each() -> None:
    low = add([measure(grown((0, 1, 0.0), (0, 1, 1.0)))] * 4)
    high = measure(grown((0, 1, 0.0), (0, 1, 0.0), (0, 1, 0.0)))
    mixed = mixture(low, high, 0.25)
    assert mixed.ratios()["leaves"] == pytest.approx(0.75 * 2 + 0.25 * 3)
    assert mixed.ratios()["mixed"] == pytest.approx(0.75)
    assert mixed.ratios()["contrast"] == pytest.approx(1.5 / 2.25)
    assert mixture(low, low, 0.0) == mixture(low, high, 0.0)


def test_sums_add_up() -> None:
    one = measure(grown((0, 2, 1.0)))
    assert one.plus(one) == add([one, one])
    assert Sums().plus(one, 2.0).leaves == 2
