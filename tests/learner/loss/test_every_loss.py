"""What holds of every policy loss: its oracle, and what it must not depend on."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import LOSSES as NAMES
from learner.loss import LOSSES
from learner.streams import Streams
from tests.learner.loss.cases import (
    SETTINGS,
    Case,
    Pair,
    Token,
    loss_of,
    oracle,
    oracle_gradient,
    random_case,
)

every_loss = pytest.mark.parametrize("name", NAMES)
SEEDS = st.integers(0, 10**6)


def close(found, expected, tolerance=1e-9):
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_the_registry_holds_what_the_configuration_offers():
    assert set(LOSSES) == set(NAMES) == set(SETTINGS)


@every_loss
@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_the_loss_equals_its_definition_pair_by_pair(name, seed):
    case = random_case(seed)
    close(loss_of(name, case)[0], oracle(name, case))


@every_loss
@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_the_gradient_equals_finite_differences_of_the_definition(name, seed):
    case = random_case(seed)
    close(loss_of(name, case)[1], oracle_gradient(name, case), 1e-5)


@every_loss
@given(seed=SEEDS)
@settings(max_examples=60, deadline=None)
def test_a_token_that_branches_share_is_worth_the_sum_over_separate_rows(name, seed):
    case = random_case(seed)
    rows = case.rows()
    for shared, apart in zip(loss_of(name, case), loss_of(name, rows), strict=True):
        summed = np.zeros(len(case.tokens))
        np.add.at(summed, [pair.token for pair in case.pairs], apart)
        close(shared, summed, 1e-6)


@every_loss
@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_gradient_is_the_same_in_one_micro_batch_and_in_several_of_unequal_lengths(name, seed):
    """Verl #6957, open-instruct #1161, TRL #3021: a mean taken in each part depends on the cut."""
    case = random_case(seed)
    branches = list(range(case.branches))
    random.Random(seed).shuffle(branches)
    middle = random.Random(seed).randint(0, len(branches))
    for whole, at in zip(loss_of(name, case), (0, 1), strict=True):
        summed = np.zeros(len(case.tokens))
        for part in (branches[:middle], branches[middle:]):
            kept = sorted({pair.token for pair in case.pairs if pair.branch in part})
            summed[kept] += loss_of(name, case.only(part))[at]
        close(whole, summed)


@every_loss
@given(seed=SEEDS)
@settings(max_examples=30, deadline=None)
def test_the_order_of_tokens_and_pairs_does_not_matter(name, seed):
    case, rng = random_case(seed), random.Random(seed + 1)
    order = rng.sample(range(len(case.tokens)), len(case.tokens))
    pairs = [dataclasses.replace(pair, token=order.index(pair.token)) for pair in case.pairs]
    moved = Case([case.tokens[at] for at in order], rng.sample(pairs, len(pairs)))
    for before, after in zip(loss_of(name, case), loss_of(name, moved), strict=True):
        close(after, [before[at] for at in order])


@every_loss
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
def test_what_masked_positions_hold_changes_neither_loss_nor_gradient(name, poison):
    """AReaL #1346, SkyRL #1635: 0 · NaN is NaN, so that multiplying by the mask is no masking."""
    for seed in range(20):
        case = random_case(seed, masked=0.4)
        streams, spoilt = case.streams(), case.streams()
        off_N, off_M = ~streams.mask, ~streams.mask[streams.pair_tokens]
        with torch.no_grad():
            for values in spoilt[:7]:
                if values.dtype != torch.bool:
                    values[off_N] = poison
            spoilt.pair_advantages[off_M] = poison
            spoilt.pair_weights[off_M] = poison
        clean = LOSSES[name].function(streams, SETTINGS[name])
        dirty = LOSSES[name].function(spoilt, SETTINGS[name])
        clean.loss.sum().backward()
        dirty.loss.sum().backward()
        assert torch.equal(clean.loss, dirty.loss) and torch.equal(clean.clipped, dirty.clipped)
        assert torch.equal(streams.logprobs.grad, spoilt.logprobs.grad)
        assert not dirty.loss[off_N].any() and not dirty.clipped[off_N].any()


@every_loss
def test_tokens_that_the_mask_drops_count_in_no_denominator(name):
    """TRL #6439: the length of a branch is that of its final mask."""
    kept = [Token(-1.0, -1.2, -1.3), Token(-0.5, -0.7, -0.4)]
    dropped = [Token(-2.0, -0.1, -4.0, counts=False)] * 3
    paid = [Pair(at, 0, -0.7) for at in range(5)]
    long, short = loss_of(name, Case(kept + dropped, paid)), loss_of(name, Case(kept, paid[:2]))
    for found, expected in zip(long, short, strict=True):
        assert found[:2] == expected and found[2:] == [0.0] * 3


@every_loss
def test_on_policy_every_loss_has_the_policy_gradient(name):
    case = random_case(5, off_policy=0.0, masked=0.0)
    expected = [0.0] * len(case.tokens)
    for pair in case.pairs:
        expected[pair.token] -= pair.weight * pair.advantage
    close(loss_of(name, case)[1], expected)


@every_loss
def test_nothing_is_divided_so_that_a_second_copy_of_the_batch_doubles_the_loss(name):
    case = random_case(3)
    shift, branches = len(case.tokens), case.branches
    copies = [dataclasses.replace(p, token=p.token + shift, branch=p.branch + branches) for p in case.pairs]
    twice = Case(case.tokens * 2, case.pairs + copies)
    for once, both in zip(loss_of(name, case), loss_of(name, twice), strict=True):
        close(both, once * 2)


@every_loss
def test_no_gradient_flows_into_what_is_no_function_of_the_policy(name):
    streams = random_case(1).streams()
    old, behaviour = (values.clone().requires_grad_() for values in (streams.old, streams.behaviour))
    streams = streams._replace(old=old, behaviour=behaviour)
    LOSSES[name].function(streams, SETTINGS[name]).loss.sum().backward()
    assert old.grad is None and behaviour.grad is None and streams.logprobs.grad is not None


@every_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprob, old", [(0.0, -1e4), (-1e4, 0.0)])
def test_an_absurd_ratio_stays_finite(name, advantage, logprob, old):
    case = Case([Token(logprob, old, old)], [Pair(0, 0, advantage)])
    loss, gradient = loss_of(name, case)
    assert np.isfinite(loss).all() and np.isfinite(gradient).all()


@every_loss
def test_a_micro_batch_of_nothing_costs_nothing(name):
    for case in (Case([], []), Case([Token(-1.0, -1.0, -1.0, counts=False)], [Pair(0, 0, 1.0)])):
        loss, gradient = loss_of(name, case)
        assert not any(loss) and not any(gradient)


@every_loss
def test_a_coefficient_that_is_not_a_number_is_never_hidden(name):
    """The update looks at the norm of the gradient; a loss that clips NaN away would train on nonsense."""
    for where in ("positive", "negative", "pair_advantages"):
        streams = Case([Token(-1.0, -1.0, -1.0)], [Pair(0, 0, 1.0)]).streams()
        spoilt = {where: torch.full((1,), math.nan, dtype=torch.float64)}
        other = {"positive": "pair_advantages", "negative": "pair_advantages", "pair_advantages": "positive"}
        spoilt[other[where]] = torch.full((1,), math.nan, dtype=torch.float64)
        LOSSES[name].function(streams._replace(**spoilt), SETTINGS[name]).loss.sum().backward()
        assert torch.isnan(streams.logprobs.grad).all()


@every_loss
def test_only_losses_with_a_term_of_their_own_train_tokens_that_are_paid_nothing(name):
    """Rows of such tokens are skipped before the forward pass, unless the loss says that it needs them."""
    case = Case([Token(-1.0, -1.3, -0.8)], [Pair(0, 0, 0.0)])
    assert (loss_of(name, case)[1] != [0.0]) is LOSSES[name].trains_unpaid


@every_loss
def test_only_losses_with_ratios_of_branches_ask_for_whole_branches(name):
    tokens = [Token(-1.0, -0.95, -0.95), Token(-1.0, -0.2, -0.2)]
    paid = [Pair(0, 0, -1.0), Pair(1, 0, -1.0)]
    whole = loss_of(name, Case(tokens, paid))[0]
    parts = [loss_of(name, Case([token], [Pair(0, 0, -1.0)]))[0][0] for token in tokens]
    assert (not np.allclose(whole, parts)) is LOSSES[name].whole_branches


def test_rows_of_tensors_make_the_same_streams_as_pairs_written_out():
    case = random_case(9).rows()
    by_hand = case.streams()
    made = Streams.of_rows(
        by_hand.logprobs, by_hand.old, by_hand.behaviour, by_hand.pair_advantages, by_hand.pair_weights,
        by_hand.pair_branches, by_hand.pair_turns, by_hand.mask,
    )  # fmt: skip
    for name, expected in by_hand._asdict().items():
        found = getattr(made, name)
        assert found == expected if name == "branches" else torch.equal(found, expected), name
