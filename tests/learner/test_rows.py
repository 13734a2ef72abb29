"""Rows: masks from spans, ages from versions, worth from the choice of node weight."""

import numpy as np
import pytest

from common.config_learner import CreditConfig, NodeWeight
from common.nouns import Tree, Version
from learner.credit import CREDITS
from learner.rows import NO_LAG, Clock, Row, RowCounts, build_rows
from tests.learner.helpers import TOKENIZER, V0, continuation, forked_tree, make_tree, node, turn

FRESH = Clock(V0, max_lag=0)


def rows_of(
    tree: Tree, weight: NodeWeight = NodeWeight.LEAF_SHARE, clock: Clock = FRESH, credit: str = "granted"
) -> tuple[list[Row], RowCounts]:
    counts = RowCounts()
    return build_rows(tree, CREDITS[credit](tree, CreditConfig()), weight, clock, counts), counts


def test_a_row_is_the_walk_from_the_prompt_with_tokens_as_sampled():
    (owner, fork), _ = rows_of(forked_tree())
    assert owner.ids.tolist() == [3, 4, 5, 6, 7, 8, 9]  # the last observation teaches nothing: cut off
    assert fork.ids.tolist() == [3, 4, 5, 6, 7, 8, 12, 13]


def test_the_mask_covers_exactly_the_sampled_tokens():
    (owner, fork), _ = rows_of(forked_tree())
    assert owner.trained.tolist() == [False] * 3 + [True, True, False, True]
    assert fork.trained.tolist() == [False] * 3 + [True, True, False, True, True]
    np.testing.assert_allclose(fork.behaviour[fork.trained], [-0.1, -0.2, -0.4, -0.5], rtol=1e-6)
    assert (fork.lags[~fork.trained] == NO_LAG).all()


def test_pad_and_end_values_inside_an_action_or_an_observation_do_not_move_the_mask():
    pad, end = TOKENIZER.pad_id, TOKENIZER.end_id
    tree = make_tree(
        [
            node(1, 0, 0, 0, turn((pad, end), (end, pad, 9))),
            node(2, 1, 0, 1, turn((end, end), (pad,)), depth=2),
        ],
        [continuation(0, [1, 2], 1.0)],
        prompt=(end, pad, end),
    )
    (row,), _ = rows_of(tree)
    assert row.trained.tolist() == [False] * 3 + [True, True] + [False] * 3 + [True, True]


def test_granted_weight_trains_a_token_in_the_row_of_the_continuation_that_sampled_it():
    (owner, fork), _ = rows_of(forked_tree(), NodeWeight.GRANTED)
    assert owner.weights[owner.trained].tolist() == [0.5, 0.5, 0.5]
    assert fork.trained.tolist() == [False] * 6 + [True, True]  # the shared prefix is context here
    assert fork.weights[fork.trained].tolist() == [0.25, 0.25]


@pytest.mark.parametrize(
    "weight, worth",
    [(NodeWeight.GRANTED, 0.5), (NodeWeight.LEAF_SHARE, 0.5 + 0.25), (NodeWeight.ONCE, (0.5 + 0.25) / 2)],
)
def test_the_worth_of_a_shared_token_summed_over_its_rows(weight, worth):
    rows, _ = rows_of(forked_tree(), weight)
    assert sum(float(row.weights[3]) for row in rows) == pytest.approx(worth)


def test_heirs_of_a_horizon_train_its_tokens_with_their_shares():
    tree = make_tree(
        [
            node(1, 0, 0, 0, turn((6,))),
            node(2, 1, 1, 0, turn((7,)), depth=2),
            node(3, 1, 2, 0, turn((8,)), depth=2),
        ],
        [
            continuation(0, [1], None, weight=1.0),
            continuation(1, [2], 1.0, anchor=1, weight=0.5, heir_of=0),
            continuation(2, [3], 0.0, anchor=1, weight=0.5, heir_of=0),
        ],
    )
    rows, _ = rows_of(tree, NodeWeight.GRANTED)
    # The lease's return is the weighted return of its heirs: 0.5 · 1 + 0.5 · 0.
    assert sum(float(row.weights[3] * row.advantages[3]) for row in rows) == pytest.approx(0.5)


def test_tokens_older_than_k_are_context_without_gradient_and_counted():
    old, new = Version(lineage=0, step=1), Version(lineage=0, step=3)
    tree = make_tree(
        [node(1, 0, 0, 0, turn((6, 7, 8), (9,), versions=[(old, 2), (new, 1)]))], [continuation(0, [1], 1.0)]
    )
    (row,), counts = rows_of(tree, clock=Clock(Version(lineage=0, step=4), max_lag=1))
    assert row.ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert row.trained.tolist() == [False] * 5 + [True]
    assert row.lags.tolist() == [NO_LAG] * 3 + [3, 3, 1]
    assert (counts.tokens_generated, counts.tokens_trained, counts.tokens_stale) == (3, 1, 2)


def test_a_branch_with_nothing_young_enough_is_dropped_but_its_length_and_success_are_kept():
    new = Version(lineage=0, step=2)
    tree = make_tree(
        [node(1, 0, 0, 0, turn((6, 7))), node(2, 0, 1, 0, turn((8,), versions=[(new, 1)]))],
        [continuation(0, [1], 1.0), continuation(1, [2], 0.0)],
    )
    rows, counts = rows_of(tree, clock=Clock(new, max_lag=1))
    assert [row.continuation for row in rows] == [1]
    assert (counts.branches, counts.stale_branches, counts.stale_branch_tokens) == (2, 1, 2)
    assert counts.stale_branch_reward == 1.0
    alone = make_tree([node(1, 0, 1, 0, tree.nodes[2].turn)], [continuation(1, [1], 0.0)])
    (other,), _ = rows_of(alone, clock=Clock(new, max_lag=1))
    assert rows[0].weights[-1] == other.weights[-1]  # the survivor is worth what it was


def test_versions_of_an_abandoned_lineage_are_infinitely_stale():
    clock = Clock(Version(lineage=1, step=6), max_lag=8, resumed=(0, 5))
    abandoned, shared = Version(lineage=0, step=6), Version(lineage=0, step=5)
    tree = make_tree(
        [node(1, 0, 0, 0, turn((6, 7), versions=[(abandoned, 1), (shared, 1)]))], [continuation(0, [1], 1.0)]
    )
    (row,), _ = rows_of(tree, clock=clock)
    assert row.trained.tolist() == [False] * 4 + [True]


@pytest.mark.parametrize("weight", NodeWeight)
def test_every_generated_token_is_trained_stale_demonstrated_or_without_credit(weight):
    new = Version(lineage=0, step=2)
    tree = make_tree(
        [
            node(1, 0, 0, 0, turn((6, 7), versions=[(V0, 1), (new, 1)])),
            node(2, 1, 1, 0, turn((8,), versions=[(new, 1)]), depth=2),
            node(3, 0, 2, 0, turn((9, 9), versions=[(new, 2)])),
            node(4, 2, 1, 1, turn((7, 8, 9), (6,), logprobs=(), versions=()), depth=3),
        ],
        [
            continuation(0, [1], None),
            continuation(1, [2, 4], 1.0, anchor=1),
            continuation(2, [3], None),
        ],
    )
    _, counts = rows_of(tree, weight, Clock(new, max_lag=0))
    assert counts.tokens_generated == 8
    taken = counts.tokens_trained + counts.tokens_without_contrast
    assert taken + counts.tokens_stale + counts.tokens_without_credit + counts.tokens_demonstrated == 8
    assert taken + counts.tokens_context == 8
    assert (counts.tokens_stale, counts.tokens_demonstrated) == (1, 3)


def test_tokens_that_are_paid_exactly_zero_are_not_counted_as_trained():
    leaves = [node(number + 1, 0, number, 0, turn((6, 7))) for number in range(2)]
    uniform = make_tree(leaves, [continuation(number, [number + 1], 1.0) for number in range(2)])
    rows, counts = rows_of(uniform, credit="grpo")
    assert not any(row.has_gradient() for row in rows)
    assert (counts.tokens_trained, counts.tokens_without_contrast, counts.tokens_generated) == (0, 4, 4)


@pytest.mark.parametrize(
    "weight, trained, without_contrast",
    [(NodeWeight.LEAF_SHARE, 4, 1), (NodeWeight.ONCE, 4, 1), (NodeWeight.GRANTED, 2, 3)],
)
def test_a_shared_token_is_trained_if_one_of_its_branches_has_a_gradient(weight, trained, without_contrast):
    # The owner (nodes 1 and 2) is paid what was predicted, the fork (node 3) is not.
    tree = make_tree(
        [
            node(1, 0, 0, 0, turn((6, 7)), value=1.0),
            node(2, 1, 0, 1, turn((8,)), depth=2),
            node(3, 1, 1, 0, turn((9, 10)), depth=2),
        ],
        [continuation(0, [1, 2], 1.0, baseline=1.0), continuation(1, [3], 0.0, anchor=1, baseline=0.5)],
    )
    _, counts = rows_of(tree, weight)
    assert (counts.tokens_trained, counts.tokens_without_contrast) == (trained, without_contrast)


def test_a_demonstration_inside_a_tree_is_context():
    shown = turn((6, 7), (8,), logprobs=(), versions=())
    tree = make_tree(
        [node(1, 0, 0, 0, shown), node(2, 1, 0, 1, turn((9,)), depth=2)], [continuation(0, [1, 2], 1.0)]
    )
    (row,), counts = rows_of(tree)
    assert row.trained.tolist() == [False] * 6 + [True]
    assert (counts.tokens_generated, counts.tokens_trained) == (3, 1)
    assert (counts.tokens_demonstrated, counts.tokens_stale, counts.tokens_without_credit) == (2, 0, 0)


def test_a_demonstration_that_names_versions_is_one_all_the_same():
    """No weights sampled it: against a behaviour log-probability of 0 its ratios would be probabilities."""
    shown = turn((6, 7), (8,), logprobs=())
    assert shown.versions and not shown.logprobs
    tree = make_tree(
        [node(1, 0, 0, 0, shown), node(2, 1, 0, 1, turn((9,)), depth=2)], [continuation(0, [1, 2], 1.0)]
    )
    (row,), counts = rows_of(tree)
    assert row.trained.tolist() == [False] * 6 + [True]
    assert (counts.tokens_generated, counts.tokens_trained, counts.tokens_demonstrated) == (3, 1, 2)


NEW = Version(lineage=0, step=2)
SHOWN, OLD, YOUNG = turn((6, 7), logprobs=(), versions=()), turn((8, 9)), turn((5,), versions=[(NEW, 1)])


@pytest.mark.parametrize("weight", NodeWeight)
@pytest.mark.parametrize(
    "made, worth, stale",
    [
        ([OLD], 0.5, 1),
        ([SHOWN, OLD], 0.5, 1),
        ([OLD, SHOWN], 0.5, 1),
        ([OLD], 0.0, 0),
        ([SHOWN], 0.5, 0),
        ([OLD, YOUNG], 0.5, 0),
        ([], 0.5, 0),
    ],
    ids=[
        "old",
        "old behind a demonstration",
        "old before one",
        "weight 0",
        "demonstration",
        "mixed",
        "empty",
    ],
)
def test_a_branch_is_stale_only_by_tokens_of_its_own_that_are_too_old(made, worth, stale, weight):
    tree = make_tree(
        [node(at + 1, at, 0, at, each, depth=at + 1) for at, each in enumerate(made)],
        [continuation(0, list(range(1, len(made) + 1)), 1.0, weight=worth)],
    )
    rows, counts = rows_of(tree, weight, Clock(NEW, max_lag=1))
    assert len(rows) == (YOUNG in made)
    assert (counts.branches, counts.stale_branches, counts.stale_branch_reward) == (1, stale, stale)
    assert counts.stale_branch_tokens == stale * tree.num_action_tokens()


def test_a_continuation_that_sampled_nothing_is_not_stale_by_what_it_inherited():
    tree = make_tree([node(1, 0, 0, 0, OLD)], [continuation(0, [1], 1.0), continuation(1, [], 1.0, anchor=1)])
    rows, counts = rows_of(tree, NodeWeight.GRANTED, Clock(NEW, max_lag=1))
    assert rows == [] and (counts.branches, counts.stale_branches) == (2, 1)
    # Where branches below share a token it is theirs to train, and both have lost all they had.
    for shared in (NodeWeight.LEAF_SHARE, NodeWeight.ONCE):
        assert rows_of(tree, shared, Clock(NEW, max_lag=1))[1].stale_branches == 2


def test_a_row_whose_coefficients_are_all_zero_has_no_gradient():
    tree = make_tree([node(1, 0, 0, 0, turn((5,)))], [continuation(0, [1], 0.5, baseline=0.5)])
    (row,), _ = rows_of(tree)
    assert not row.has_gradient()
    assert all(row.has_gradient() for row in rows_of(forked_tree())[0])
