"""Attention: the same rule as a block mask, a dense mask and in chunks; plain calls are left as they were."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from common.tokenizer import WordTokenizer
from learner.attention import (
    IMPLEMENTATION,
    block_mask,
    chunk_plan,
    dense_mask,
    filled_up,
    mask_mod,
    model_inputs,
    prepare,
    tree_attention,
)
from learner.batching import micro_batches
from learner.layout import lay_out
from learner.policy import build_model, model_files
from tests.learner.forests import ARCHITECTURES, random_rows, small_forests, tiny_model
from tests.learner.helpers import SMALL_MODEL, TOKENIZER


def packed(seed: int = 0, trees: int = 2):
    rows = random_rows(seed, trees=trees)
    (batch,) = micro_batches(rows, range(len(rows)), 10_000, "tree")
    assert batch.ends_BT is not None
    return batch


def hidden(model, **inputs) -> torch.Tensor:
    return model.base_model(use_cache=False, **inputs).last_hidden_state


def test_the_mask_function_says_what_the_dense_mask_says_for_every_two_places():
    forests = small_forests()[::11]
    lines = [torch.from_numpy(lay_out(paths).ends)[None] for paths in forests]
    for ends in [*lines, packed().ends_BT]:
        places = torch.arange(ends.shape[1])
        found = mask_mod(ends)(torch.tensor(0), torch.tensor(0), places[:, None], places[None, :])
        assert torch.equal(found, dense_mask(ends)[0, 0])


def test_several_lines_have_a_mask_each():
    ends = torch.tensor([[4, 2, 4, 4], [4, 4, 3, 4]])
    dense = dense_mask(ends)
    assert dense.shape == (2, 1, 4, 4)
    assert dense[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert dense[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]


def test_the_block_mask_leaves_out_only_blocks_in_which_nothing_is_seen():
    paths = [lay_out(paths).ends for paths in small_forests()[-40:]]
    shifts = np.cumsum([0, *map(len, paths)])
    ends = torch.from_numpy(np.concatenate([p + by for p, by in zip(paths, shifts, strict=False)]))[None]
    length = ends.shape[1]
    assert length > 256
    blocks = block_mask(ends)
    assert blocks.shape == (1, 1, length, length)
    dense = dense_mask(ends)
    made = create_mask(blocks.mask_mod, 1, 1, length, length, device="cpu")
    assert torch.equal(made, dense)
    more = -length % 128
    tiles = torch.nn.functional.pad(dense[0, 0], (0, more, 0, more)).unfold(0, 128, 128).unfold(1, 128, 128)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), tiles.flatten(2).any(-1))


@pytest.mark.parametrize("heads, shared", [(4, 4), (4, 2), (6, 1)])
def test_attention_in_chunks_equals_attention_under_the_dense_mask_with_its_gradients(
    heads, shared, monkeypatch
):
    monkeypatch.setattr("learner.layout.PAIRS_A_CHUNK", 0)
    monkeypatch.setattr("learner.layout.MAX_QUERIES", 7)
    ends = packed(1).ends_BT
    length = ends.shape[1]
    plan = chunk_plan(ends[0])
    assert len(plan.chunks) > 5
    torch.manual_seed(0)
    states = [torch.randn(1, count, length, 8, requires_grad=True) for count in (heads, shared, shared)]
    upstream = torch.randn(1, length, heads, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // shared  # type: ignore[assignment]
    results = []
    for tree, mask in ((plan, None), (None, dense_mask(ends))):
        out, _ = tree_attention(module, *states, mask, scaling=0.3, tree=tree)
        results.append([out, *torch.autograd.grad(out, states, upstream)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_hidden_states_are_those_of_each_branch_alone(name):
    model = tiny_model(name)
    rows = random_rows(2)
    (batch,) = micro_batches(rows, range(len(rows)), 10_000, "tree")
    with torch.no_grad():
        line = model.base_model(**model_inputs(model, batch)).last_hidden_state[0]
        sources = batch.sources_N[batch.pair_tokens_M]
        for branch, place in enumerate(batch.branches):
            alone = hidden(tiny_model(name), input_ids=torch.from_numpy(rows[place].ids[None, :-1]))[0]
            mine = sources[batch.pair_branches_M == branch]
            at = torch.from_numpy(np.flatnonzero(rows[place].trained) - 1)
            torch.testing.assert_close(line[mine], alone[at], rtol=1e-4, atol=1e-5)


def test_a_plain_call_of_a_prepared_model_is_bit_for_bit_that_of_before():
    ids = torch.randint(3, 24, (3, 17), generator=torch.Generator().manual_seed(0))
    for name in ARCHITECTURES:
        model, other = tiny_model(name), tiny_model(name)
        prepare(model)
        assert torch.equal(hidden(model, input_ids=ids), hidden(other, input_ids=ids))


def test_rows_are_given_to_the_model_without_mask_or_positions():
    (batch,) = micro_batches(random_rows(3)[:1], [0], 1000, "rows")
    model = tiny_model()
    assert set(model_inputs(model, batch)) == {"input_ids", "use_cache"}
    assert model.config._attn_implementation == "sdpa"


def test_what_a_model_is_prepared_for_is_not_saved_with_it():
    model = build_model(SMALL_MODEL, TOKENIZER, seed=1)
    before = model_files(model, TOKENIZER)
    prepare(model)
    assert model.config._attn_implementation == IMPLEMENTATION
    assert model_files(model, TOKENIZER) == before
    assert IMPLEMENTATION.encode() not in before["config.json"]
    assert isinstance(TOKENIZER, WordTokenizer)


def test_a_line_is_filled_up_with_tokens_that_see_and_are_seen_by_themselves_only():
    batch = packed(4)
    length = batch.ids_BT.shape[1]
    ids, positions, ends = filled_up(batch.ids_BT, batch.positions_BT, batch.ends_BT, 128)
    assert ids.shape == positions.shape == ends.shape == (1, -(-length // 128) * 128)
    dense = dense_mask(ends)[0, 0]
    assert torch.equal(dense[:length, :length], dense_mask(batch.ends_BT)[0, 0])
    assert not dense[:length, length:].any() and not dense[length:, :length].any()
    assert torch.equal(dense[length:, length:], torch.eye(ids.shape[1] - length, dtype=torch.bool))
    again = filled_up(ids, positions, ends, 128)
    assert all(torch.equal(a, b) for a, b in zip(again, (ids, positions, ends), strict=True))


@pytest.mark.parametrize("filling", [0, 7, 23])
def test_what_a_line_is_filled_up_with_changes_nothing(filling):
    model = tiny_model()
    prepare(model)
    batch = packed(5)
    length = batch.ids_BT.shape[1]
    ids, positions, ends = filled_up(batch.ids_BT, batch.positions_BT, batch.ends_BT, 64)
    ids[:, length:] = filling
    with torch.no_grad():
        found = hidden(model, input_ids=ids, position_ids=positions, attention_mask=dense_mask(ends))
        expected = model.base_model(**model_inputs(model, batch)).last_hidden_state
    torch.testing.assert_close(found[:, :length], expected, rtol=1e-4, atol=1e-5)


def test_a_packed_batch_of_two_lines_is_refused_on_the_cpu():
    batch = packed(6)
    doubled = [getattr(batch, name).repeat(2, 1) for name in ("ids_BT", "positions_BT", "ends_BT")]
    from dataclasses import replace

    with pytest.raises(ValueError, match="one line, not 2"):
        model_inputs(
            tiny_model(), replace(batch, ids_BT=doubled[0], positions_BT=doubled[1], ends_BT=doubled[2])
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_a_block_mask_takes_the_model_through_flexattention_with_the_same_hidden_states(name, monkeypatch):
    """As on CUDA, but not compiled."""
    import transformers.integrations.flex_attention as flex

    calls = []

    def eager(query, key, value, training=False, **more):
        calls.append(more["block_mask"])
        return flex.flex_attention(query, key, value, **more)

    monkeypatch.setattr(flex, "compile_friendly_flex_attention", eager)
    model = tiny_model(name)
    prepare(model)
    batch = packed(7)
    length = batch.ids_BT.shape[1]
    ids, positions, ends = filled_up(batch.ids_BT, batch.positions_BT, batch.ends_BT, 128)
    with torch.no_grad():
        found = hidden(model, input_ids=ids, position_ids=positions, attention_mask=block_mask(ends))
        expected = model.base_model(**model_inputs(model, batch)).last_hidden_state
    assert len(calls) == model.config.num_hidden_layers
    torch.testing.assert_close(found[:, :length], expected, rtol=1e-4, atol=1e-5)
