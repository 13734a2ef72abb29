"""Packing: the gradient is branch-by-branch training's, whatever is packed with what."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import learner.batching
from common.config_learner import LossConfig, NodeWeight
from learner.batching import MicroBatch, micro_batches
from learner.loss import LOSSES
from learner.packing import Group, groups, pack_group, token_keys
from learner.policy import token_logprobs
from tests.learner.forests import ARCHITECTURES, random_rows, tiny_model
from tests.learner.helpers import forked_tree

LOSS = LossConfig(clip_low=0.2, clip_high=0.28)
TEMPERATURE = 0.9


@pytest.fixture(autouse=True)
def everything_is_packed(monkeypatch):
    """However little is shared; the fallback has a test of its own."""
    monkeypatch.setattr(learner.batching, "MIN_SHARING", 0.0)


def literal_objective(model, rows) -> torch.Tensor:
    """Branch by branch, one at a time, the clipped surrogate written out for every token that it trains."""
    total = torch.zeros(())
    for row in rows:
        logits = model(input_ids=torch.from_numpy(row.ids[None, :-1])).logits[0].float() / TEMPERATURE
        logprobs = torch.log_softmax(logits, -1)
        for at in np.flatnonzero(row.trained):
            r = torch.exp(logprobs[at - 1, row.ids[at]] - float(row.behaviour[at]))
            advantage = float(row.advantages[at])
            clipped = torch.clamp(r, 1 - LOSS.clip_low, 1 + LOSS.clip_high)
            total = total - float(row.weights[at]) * torch.minimum(r * advantage, clipped * advantage)
    return total


def objective(model, batch: MicroBatch, loss: str = "ppo") -> torch.Tensor:
    logprobs = token_logprobs(model, batch, TEMPERATURE).logprobs
    return LOSSES[loss].function(batch.streams(logprobs, batch.behaviour_N), LOSS).loss.sum()


def gradient(model, objectives) -> torch.Tensor:
    model.zero_grad()
    for value in objectives:
        value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def packed_gradient(model, rows, budget: int = 10_000, layout: str = "tree", loss: str = "ppo"):
    batches = micro_batches(rows, range(len(rows)), budget, layout)
    return gradient(model, (objective(model, batch, loss) for batch in batches))


def off_by(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def clipped_share(model, rows) -> float:
    (batch,) = micro_batches(rows, range(len(rows)), 10_000, "tree")
    with torch.no_grad():
        logprobs = token_logprobs(model, batch, TEMPERATURE).logprobs
    return float(
        LOSSES["ppo"].function(batch.streams(logprobs, batch.behaviour_N), LOSS).clipped.float().mean()
    )


# ------------------------------------------------------------------------------------------- the gradient


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_gradient_equals_that_of_branch_by_branch_training(name):
    model = tiny_model(name)
    rows = random_rows(1, trees=3)
    assert 0.1 < clipped_share(model, rows) < 0.9
    expected = gradient(model, [literal_objective(model, rows)])
    assert off_by(packed_gradient(model, rows), expected) < 1e-5
    assert off_by(packed_gradient(model, rows, layout="rows"), expected) < 1e-5


@pytest.mark.parametrize("weight", NodeWeight)
def test_the_gradient_is_equal_for_every_worth_of_a_shared_token(weight):
    model = tiny_model()
    rows = random_rows(2, trees=2, weight=weight)
    expected = gradient(model, [literal_objective(model, rows)])
    assert off_by(packed_gradient(model, rows), expected) < 1e-5


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 160), st.integers(1, 3))
def test_the_gradient_does_not_depend_on_what_is_packed_together(seed, budget, trees):
    model = tiny_model(num_hidden_layers=1)
    rows = random_rows(seed, trees=trees)
    expected = packed_gradient(model, rows, layout="rows")
    assert off_by(packed_gradient(model, rows, budget), expected) < 1e-5


def test_a_tree_split_at_any_budget_gives_the_same_gradient():
    model = tiny_model(num_hidden_layers=1)
    rows = random_rows(3, continuations=10)
    whole = packed_gradient(model, rows)
    counts = set()
    for budget in range(1, 100, 7):
        counts.add(len(list(micro_batches(rows, range(len(rows)), budget, "tree"))))
        assert off_by(packed_gradient(model, rows, budget), whole) < 1e-5
    assert len(counts) > 4, "the budgets must cut in different places"


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_rows(loss):
    model = tiny_model(num_hidden_layers=1)
    rows = random_rows(4, trees=2)
    expected = packed_gradient(model, rows, layout="rows", loss=loss)
    for budget in (40, 10_000):
        assert off_by(packed_gradient(model, rows, budget, loss=loss), expected) < 1e-5


def test_shared_tokens_are_paid_both_ways_and_the_signs_stay_apart():
    rows = random_rows(1)
    (batch,) = micro_batches(rows, range(len(rows)), 10_000, "tree")
    both = (batch.positive_N > 0) & (batch.negative_N > 0)
    assert both.any()
    for token in both.nonzero().flatten().tolist():
        mine = batch.pair_tokens_M == token
        payments = (batch.pair_weights_M * batch.pair_advantages_M)[mine]
        assert float(payments.clamp(min=0).sum()) == pytest.approx(float(batch.positive_N[token]), rel=1e-6)
        assert float(-payments.clamp(max=0).sum()) == pytest.approx(float(batch.negative_N[token]), rel=1e-6)
        assert float(batch.pair_weights_M[mine].sum()) == pytest.approx(
            float(batch.weights_N[token]), rel=1e-6
        )


def test_terms_without_advantage_add_up_to_those_of_rows():
    model = tiny_model(num_hidden_layers=1)
    rows = random_rows(5, trees=2)

    def entropy(layout):
        batches = micro_batches(rows, range(len(rows)), 60, layout)
        return gradient(
            model,
            (
                (batch.weights_N * token_logprobs(model, batch, 1.0, entropy_gradient=True).entropies).sum()
                for batch in batches
            ),
        )

    assert off_by(entropy("tree"), entropy("rows")) < 1e-5


def test_in_bfloat16_both_layouts_are_as_far_from_float32():
    model = tiny_model()
    rows = random_rows(6, trees=2)
    exact = packed_gradient(model, rows, layout="rows")
    half = tiny_model().to(torch.bfloat16)
    packed, by_rows = packed_gradient(half, rows), packed_gradient(half, rows, layout="rows")
    # 8 bits of mantissa, some ten roundings deep: a few per cent, from rounding and from clips that flip.
    assert off_by(by_rows, exact) < 0.05 and off_by(packed, exact) < 0.05
    assert off_by(packed, by_rows) < 0.05


# ------------------------------------------------------------------------------------------ what is in it


def test_each_token_is_computed_once_so_that_the_saving_is_the_token_ratio():
    rows = random_rows(7, trees=3)
    computed = sum(batch.computed_tokens for batch in micro_batches(rows, range(len(rows)), 10_000, "tree"))
    unique = {key for row in rows for key in token_keys(row)[:-1].tolist()}
    assert computed == len(unique) < sum(row.length - 1 for row in rows)


@given(st.integers(0, 10_000), st.integers(1, 150), st.sampled_from(["rows", "tree"]))
def test_every_pair_of_a_token_and_a_branch_is_trained_once(seed, budget, layout):
    rows = random_rows(seed, trees=2)
    found = []
    for batch in micro_batches(rows, range(len(rows)), budget, layout):
        keys = batch.keys_N[batch.pair_tokens_M].tolist()
        branches = [batch.branches[branch] for branch in batch.pair_branches_M.tolist()]
        paid = zip(batch.pair_advantages_M.tolist(), batch.pair_weights_M.tolist(), strict=True)
        found += list(zip(keys, branches, paid, strict=True))
        if layout == "tree":
            assert len(set(batch.keys_N.tolist())) == len(batch.keys_N), "each token stands once"
    expected = [
        (int(token_keys(row)[at]), place, (float(row.advantages[at]), float(row.weights[at])))
        for place, row in enumerate(rows)
        for at in np.flatnonzero(row.trained)
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("layout", ["rows", "tree"])
def test_turn_segments_are_the_turns_of_each_branch(layout):
    rows = random_rows(8, trees=2)
    for batch in micro_batches(rows, range(len(rows)), 10_000, layout):
        nodes = (batch.keys_N >> 17)[batch.pair_tokens_M]  # tree and node
        expected = {(b, n) for b, n in zip(batch.pair_branches_M.tolist(), nodes.tolist(), strict=True)}
        turns = batch.pair_turns_M.tolist()
        found = set(zip(turns, batch.pair_branches_M.tolist(), nodes.tolist(), strict=True))
        assert len(found) == len(expected) == len(set(turns)) == max(turns) + 1


def test_streams_of_a_token_are_those_of_its_row():
    rows = random_rows(9, trees=2)
    by_key = {}
    for row in rows:
        for at in np.flatnonzero(row.trained):
            by_key[int(token_keys(row)[at])] = (
                row.ids[at],
                row.ids[at - 1],
                row.behaviour[at],
                row.lags[at],
                at,
            )
    for batch in micro_batches(rows, range(len(rows)), 50, "tree"):
        for token, key in enumerate(batch.keys_N.tolist()):
            target, before, behaviour, lag, at = by_key[key]
            source = int(batch.sources_N[token])
            assert (batch.targets_N[token], batch.ids_BT[0, source]) == (target, before)
            assert (batch.behaviour_N[token], batch.lags_N[token]) == (behaviour, lag)
            assert batch.positions_BT[0, source] == at - 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_untrained_tokens_hold_has_no_effect(poison):
    model = tiny_model(num_hidden_layers=1)
    rows, spoilt = random_rows(10), random_rows(10)
    for row in spoilt:
        for stream in (row.behaviour, row.advantages, row.weights):
            stream[~row.trained] = poison
    assert torch.equal(packed_gradient(model, rows, 60), packed_gradient(model, spoilt, 60))


def test_keys_tell_trees_nodes_and_tokens_apart_and_repeat_for_the_same_token():
    rows = random_rows(11, trees=2)
    tokens: dict[int, set[tuple[int, int, int]]] = {}
    for row in rows:
        starts = {node: row.nodes.tolist().index(node) for node in set(row.nodes.tolist())}
        for at, key in enumerate(token_keys(row).tolist()):
            node = int(row.nodes[at])
            tokens.setdefault(key, set()).add((row.tree, node, at - starts[node]))
    assert all(len(meant) == 1 for meant in tokens.values())
    assert len(tokens) == len(set.union(*tokens.values()))


def test_rows_of_different_trees_are_never_merged():
    rows = random_rows(12, trees=2)
    assert {
        len({rows[place].tree for place in group.places}) for group in groups(rows, range(len(rows)), 999)
    } == {1}
    mixed = groups(rows, range(len(rows)), 999)
    with pytest.raises(ValueError, match="several trees"):
        pack_group(rows, Group(tuple(range(len(rows))), mixed[0].paths, mixed[0].layout))


def test_the_forked_tree_packs_as_written_by_hand():
    from tests.learner.forests import rows_of

    rows = rows_of([forked_tree()])
    (batch,) = micro_batches(rows, [0, 1], 100, "tree")
    # prompt 3 4 5, node 1 with 6 7 | 8; node 2's only action token 9 is a target, node 3 begins with 12
    assert batch.ids_BT.tolist() == [[3, 4, 5, 6, 7, 8, 12]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert batch.ends_BT is not None and batch.ends_BT.tolist() == [[7] * 7]
    assert batch.targets_N.tolist() == [6, 7, 9, 12, 13]
    assert batch.sources_N.tolist() == [2, 3, 5, 5, 6]
    assert batch.pair_branches_M.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.pair_tokens_M.tolist() == [0, 1, 2, 0, 1, 3, 4]
    assert batch.pair_turns_M.tolist() == [0, 0, 1, 2, 2, 3, 3]


def test_recomputing_activations_in_the_backward_pass_changes_nothing():
    rows = random_rows(13, trees=2)
    expected = packed_gradient(tiny_model(), rows)
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # transformers recomputes only then; there is no dropout in these models
    assert off_by(packed_gradient(model, rows), expected) < 1e-6
