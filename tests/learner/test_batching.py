"""Micro-batches: every row once, within the budget; what shares nothing is not packed."""

import numpy as np
import pytest
import torch

from learner.batching import cut, micro_batches, of_rows
from tests.learner.forests import random_rows, rows_of
from tests.learner.helpers import flat_trees


def test_micro_batches_hold_every_row_once_and_stay_within_the_padded_budget():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 90, 100).tolist()
    parts = cut(lengths, 256)
    assert sorted(index for part in parts for index in part) == list(range(100))
    assert all(len(part) * max(lengths[index] for index in part) <= 256 for part in parts)


def test_a_row_longer_than_the_budget_comes_alone():
    assert cut([10, 300, 10], 64) == [[1], [0, 2]]


def test_one_by_one_keeps_the_canonical_order():
    assert cut([3, 9, 1], 64, one_by_one=True) == [[0], [1], [2]]


@pytest.mark.parametrize("layout", ["rows", "tree"])
@pytest.mark.parametrize("budget", [1, 30, 64, 1000])
def test_chosen_rows_are_trained_once_within_the_budget(layout, budget):
    rows = random_rows(0, trees=4)
    chosen = list(range(0, len(rows), 2))
    batches = list(micro_batches(rows, chosen, budget, layout))
    assert sorted(place for batch in batches for place in batch.branches) == chosen
    for batch in batches:
        assert batch.computed_tokens <= budget or len(batch.branches) == 1


def test_rows_that_share_next_to_nothing_go_one_a_line():
    long = flat_trees(3, seed=1, branches=2, max_turns=30)
    for tree in long:  # nothing but a prompt of one token is shared
        tree.nodes[0] = tree.nodes[0].__class__(
            **{**{name: getattr(tree.nodes[0], name) for name in tree.nodes[0].__struct_fields__},
               "turn": tree.nodes[0].turn.__class__(observation=b"\x03\x00\x00\x00")}
        )  # fmt: skip
    packed = random_rows(2, trees=1)
    rows = [row for row in rows_of(long) if row.length > 60]
    assert rows
    rows += packed
    batches = list(micro_batches(rows, range(len(rows)), 1000, "tree"))
    assert [batch.ends_BT is None for batch in batches] == [False, True]
    assert sorted(batches[0].branches) == list(range(len(rows) - len(packed), len(rows)))


def test_one_by_one_is_branch_by_branch_even_where_trees_are_asked_for():
    rows = random_rows(3)
    batches = list(micro_batches(rows, range(len(rows)), 1000, "tree", one_by_one=True))
    assert [batch.branches for batch in batches] == [(place,) for place in range(len(rows))]
    assert all(batch.ends_BT is None for batch in batches)


def test_an_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="one of rows, tree"):
        list(micro_batches([], [], 10, "forest"))


def test_a_first_token_that_nothing_predicts_is_refused():
    (row, *_) = random_rows(4)
    row.trained[0] = True
    with pytest.raises(ValueError, match="nothing predicts it"):
        of_rows([row], [0])


def test_a_batch_moves_to_another_device_with_all_its_tensors():
    (batch,) = micro_batches(random_rows(5), [0, 1], 1000, "tree")
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    tensors = [getattr(moved, name) for name in moved.__slots__ if name != "branches"]
    assert all(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors)
    assert moved.branches == batch.branches
