"""The layout: who sees whom, exhaustively for small trees; groups, lines and chunks for random ones."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.attention import chunk_plan, dense_mask
from learner.layout import Path, chunks, fill, lay_out, path_of, split
from tests.learner.forests import random_rows, small_forests


def seen_by(ends: np.ndarray, place: int) -> list[int]:
    return [k for k in range(len(ends)) if k <= place < ends[k]]


def test_every_token_sees_exactly_its_branch_up_to_itself_in_every_small_tree():
    checked = 0
    for paths in small_forests():
        layout = lay_out(paths)
        for path in paths:
            places = layout.places(path).tolist()
            for nth, place in enumerate(places):
                assert seen_by(layout.ends, place) == places[: nth + 1]
                checked += 1
    assert checked > 5_000


def test_a_packed_tree_holds_each_token_once_and_no_others():
    for paths in small_forests():
        layout = lay_out(paths)
        longest: dict[int, int] = {}
        for path in paths:
            for node, length in zip(path.nodes, path.lengths, strict=True):
                longest[node] = max(length, longest.get(node, 0))
        assert layout.length == sum(longest.values())
        used = set().union(*(layout.places(path).tolist() for path in paths))
        assert used == set(range(layout.length))


def test_children_stand_in_the_order_of_their_index_whatever_order_their_branches_come_in():
    paths = [Path((0, 2), (1, 1)), Path((0, 1, 3), (1, 2, 1))]
    for order in (paths, paths[::-1]):
        layout = lay_out(order)
        assert layout.starts == {0: 0, 1: 1, 3: 3, 2: 4}
        assert layout.ends.tolist() == [5, 4, 4, 4, 5]


def test_a_deep_chain_needs_no_recursion():
    layout = lay_out([Path(tuple(range(5000)), (1,) * 5000)])
    assert layout.ends.tolist() == [5000] * 5000


def test_a_path_is_a_row_without_its_last_token_by_node():
    for row in random_rows(0, trees=3):
        path = path_of(row)
        assert path.length == row.length - 1
        assert np.repeat(path.nodes, path.lengths).tolist() == row.nodes[:-1].tolist()


# ------------------------------------------------------------------------------------------- under budgets


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_groups_hold_each_path_once_and_stay_within_the_budget_unless_one_path_alone_is_longer(seed, budget):
    paths = [path_of(row) for row in random_rows(seed)]
    groups = split(paths, budget)
    assert sorted(index for group in groups for index in group) == list(range(len(paths)))
    for group in groups:
        assert lay_out([paths[index] for index in group]).length <= budget or len(group) == 1


def test_a_split_tree_repeats_shared_prefixes_and_nothing_else():
    # root (10 tokens) with two forks, two leaves below each
    paths = [Path((0, fork, leaf), (10, 6, 4)) for fork, leaf in ((1, 3), (2, 5), (1, 4), (2, 6))]
    assert split(paths, 100) == [[0, 2, 1, 3]]  # depth first, not as they came
    assert split(paths, 24) == [[0, 2], [1, 3]]
    assert [lay_out([paths[index] for index in group]).length for group in split(paths, 24)] == [24, 24]


@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 100))
def test_lines_hold_each_group_once_and_two_lines_never_fit_into_one(lengths, budget):
    lines = fill(lengths, budget)
    assert sorted(index for line in lines for index in line) == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in line) for line in lines]
    assert all(total <= budget or len(line) == 1 for total, line in zip(totals, lines, strict=True))
    assert sum(total <= budget / 2 for total in totals) <= 1


# ---------------------------------------------------------------------------------------------- the chunks


def assert_chunks_say_what_ends_say(ends: np.ndarray) -> None:
    tensor = torch.from_numpy(ends)
    dense, plan = dense_mask(tensor[None])[0, 0], chunk_plan(tensor)
    assert [chunk.start for chunk in plan.chunks] == [0, *(chunk.stop for chunk in plan.chunks[:-1])]
    assert plan.chunks[-1].stop == sum(plan.borders) == len(ends)
    pieces = np.split(np.arange(len(ends)), np.cumsum(plan.borders)[:-1])
    for chunk, mask, seen in zip(plan.chunks, plan.masks, plan.seen, strict=True):
        queries = np.arange(chunk.start, chunk.stop)
        keys = np.concatenate([*(pieces[piece] for piece in seen), queries])
        assert len(keys) == chunk.keys
        causal = torch.from_numpy(keys[None, :] <= queries[:, None])
        found = torch.zeros(len(queries), len(ends), dtype=torch.bool)
        found[:, keys] = causal if mask is None else mask
        assert torch.equal(found, dense[chunk.start : chunk.stop])


def test_chunks_see_what_the_mask_says_in_every_small_tree_however_they_are_cut(monkeypatch):
    for overhead, queries in ((0, 2), (4, 1), (1 << 14, 512)):
        monkeypatch.setattr("learner.layout.PAIRS_A_CHUNK", overhead)
        monkeypatch.setattr("learner.layout.MAX_QUERIES", queries)
        for paths in small_forests()[:: 1 if overhead == 0 else 7]:
            assert_chunks_say_what_ends_say(lay_out(paths).ends)


@given(st.integers(0, 10_000), st.sampled_from([0, 20, 400]), st.sampled_from([2, 7, 512]))
def test_chunks_see_what_the_mask_says_in_random_trees_end_to_end(seed, overhead, queries):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("learner.layout.PAIRS_A_CHUNK", overhead)
        patch.setattr("learner.layout.MAX_QUERIES", queries)
        parts = [lay_out([path_of(row) for row in random_rows(seed + n)]).ends for n in range(3)]
        shifts = np.cumsum([0, *map(len, parts)])
        assert_chunks_say_what_ends_say(
            np.concatenate([part + by for part, by in zip(parts, shifts[:-1], strict=True)])
        )


def test_a_tree_costs_about_the_pairs_that_it_has_and_not_the_square_of_its_length():
    # 8 branches of 200 tokens behind a shared prefix of 1,000
    ends = lay_out([Path((0, branch), (1000, 200)) for branch in range(1, 9)]).ends
    needed = int(dense_mask(torch.from_numpy(ends)[None]).sum())
    assert sum(chunk.pairs for chunk in chunks(ends)) < 1.15 * needed < 0.4 * len(ends) ** 2


def test_tiny_trees_share_a_call_of_the_kernel():
    parts = [lay_out([path_of(row) for row in random_rows(seed)]).ends for seed in range(3)]
    shifts = np.cumsum([0, *map(len, parts)])
    ends = np.concatenate([part + by for part, by in zip(parts, shifts[:-1], strict=True)])
    assert len(ends) > 100 and len(chunks(ends)) == 1
    assert chunks(np.zeros(0, np.int64)) == []
