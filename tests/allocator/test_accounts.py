"""What trees cost, worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from allocator.accounts import account_stats, count_tree
from allocator.rules.base import Pick
from allocator.rules.flat import FlatRule
from common.nouns import ROOT, RewardSource
from tests.allocator.rules.garden import Garden


def grown() -> Garden:
    """Two turns from the prompt (tokens 2, 2), one from a prefix (3 tokens), a path with two heirs."""
    garden = Garden(FlatRule(), 4)
    first, *_ = garden.path([0.5], 1.0)
    late = garden.start(first)
    garden.turn(late, last=True, logprobs=[-1.0] * 3)
    garden.end(late, 0.0)
    (parent,) = garden.grow(Pick(ROOT, horizon=1))
    tip = garden.turn(parent)
    garden.forest.end(parent, "horizon", None)
    for heir in garden.grow(Pick(tip, heir_of=parent.number), Pick(tip, heir_of=parent.number)):
        garden.turn(heir, last=True, logprobs=[-1.0] * 5)
        garden.end(heir, 1.0)
    return garden


def test_continuations_and_tokens_are_told_apart_by_where_they_start() -> None:
    account: Counter[str] = Counter()
    count_tree(account, grown().tree)
    assert account_stats(account) == {
        "trees": 1, "mixed_share": 1,
        "roots_per_tree": 2, "roots_tokens_mean": (4 + 2) / 2,
        "prefixes_per_tree": 1, "prefixes_tokens_mean": 3,
        "heirs_per_tree": 2, "heirs_tokens_mean": 5,
        "continuations_per_tree": 3, "tokens_per_tree": 4 + 2 + 3 + 10,
    }  # fmt: skip


def test_nothing_is_told_before_the_first_tree() -> None:
    assert account_stats(Counter()) == {}


@pytest.mark.parametrize("rewards, source, mixed", [
    ((1.0, 1.0), RewardSource.ENVIRONMENT, 0), ((1.0, 0.0), RewardSource.ENVIRONMENT, 1),
    ((1.0, 0.0), RewardSource.PRUNE_RULE, 0), ((), RewardSource.ENVIRONMENT, 0),
])  # fmt: skip
def test_outcomes_that_differ_are_those_of_the_environment(
    rewards: tuple[float, ...], source: RewardSource, mixed: int
) -> None:
    garden = Garden(FlatRule(), 4)
    for reward in rewards:
        branch = garden.start()
        garden.turn(branch, last=True)
        garden.end(branch, reward, source)
    account: Counter[str] = Counter()
    count_tree(account, garden.tree)
    assert account_stats(account)["mixed_share"] == mixed


def test_every_tree_that_is_closed_is_counted_and_what_was_not_selected_is_not() -> None:
    garden = grown()
    garden.forest.close(garden.tree)
    assert garden.forest.account["trees"] == 1
    other = Garden(FlatRule(), 4)
    other.forest.remove(other.tree)
    assert account_stats(other.forest.account) == {}
