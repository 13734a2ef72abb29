"""What passes without gradient say of tokens: once each, whatever micro-batches they stand in."""

import pytest
import torch

from learner.batching import MicroBatch, micro_batches
from learner.passes import KnownTokens, every_sampled_token, known_tokens, turn_log_ratios
from tests.learner.helpers import V0, forked_tree

TREES = [forked_tree(number) for number in (2, 5)]
MU = {1: (-0.1, -0.2), 2: (-0.3,), 3: (-0.4, -0.5)}
"""Behaviour log-probabilities of a forked tree, by node."""


def by_branch() -> list[MicroBatch]:
    """Every branch by itself: node 1 is in two of them."""
    rows = every_sampled_token(TREES, V0)
    return list(micro_batches(rows, range(len(rows)), 1, "rows", one_by_one=True))


class Asked:
    """Says −(the number of the batch, from 1) of every token, in half precision."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, batch: MicroBatch) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        self.batches += 1
        return torch.full((len(batch.keys_N),), -float(self.batches), dtype=torch.float16)


def test_the_log_ratio_of_a_turn_is_the_sum_over_its_tokens_each_counted_once():
    """A token that two micro-batches hold is taken from the first, as everywhere."""
    said = Asked()
    found = turn_log_ratios(by_branch(), said)
    first = {2: {1: 1, 2: 1, 3: 2}, 5: {1: 3, 2: 3, 3: 4}}  # the batch that each node is first in
    assert said.batches == 4
    assert found == {
        tree: {node: pytest.approx(sum(-batch - mu for mu in MU[node])) for node, batch in nodes.items()}
        for tree, nodes in first.items()
    }


def test_the_proximal_policy_and_the_ratios_are_of_one_pass_over_the_same_tokens(monkeypatch):
    """One loop: what a pass does to tokens (which counts, where they lie, in which precision) holds for both."""
    passes: list[KnownTokens] = []

    def watched(batches, ask):
        passes.append(known_tokens(batches, ask))
        return passes[-1]

    monkeypatch.setattr("learner.passes.known_tokens", watched)
    turn_log_ratios(by_branch(), Asked())
    (ratios,), proximal = passes, known_tokens(by_branch(), Asked())
    assert torch.equal(ratios.keys, proximal.keys)
    assert ratios.values.dtype == proximal.values.dtype == torch.float32
    assert (ratios.keys.diff() > 0).all() and len(ratios.keys) == 2 * sum(map(len, MU.values()))


def test_no_batches_say_nothing():
    assert turn_log_ratios([], Asked()) == {}
    with pytest.raises(KeyError):
        known_tokens([], Asked()).at(torch.tensor([1]))
