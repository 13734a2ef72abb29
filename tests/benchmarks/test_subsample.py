"""What a baseline would be with fewer continuations, against all subsets counted one by one."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from benchmarks.contrast import Sums, add
from benchmarks.subsample import at, chain_of, flat_curve, random_curve
from tests.benchmarks.test_contrast import grown

OUTCOMES = (1.0, 0.0, 0.0, 1.0, 0.0)


def test_a_flat_tree_at_a_size_is_the_mean_over_all_subsets_of_that_size() -> None:
    tree = grown(*((0, turns, reward) for turns, reward in zip((1, 2, 3, 1, 3), OUTCOMES, strict=True)))
    curve = flat_curve([tree], 5)
    for size in range(1, 6):
        subsets = list(combinations(OUTCOMES, size))
        share = [sum(subset) / size for subset in subsets]
        mass = sum(2 * math.sqrt(p * (1 - p)) for p in share) / len(subsets)
        mixed = sum(len(set(subset)) == 2 for subset in subsets) / len(subsets)
        ratios = curve[size - 1].ratios()
        assert ratios["rifb"] == pytest.approx(mass)
        assert ratios["mixed"] == ratios["contrast"] == pytest.approx(mixed)
        assert ratios["success"] == pytest.approx(2 / 5)
        assert ratios["tokens"] == pytest.approx(20 * size / 5)
        assert ratios["leaves"] == size


def test_a_random_tree_at_a_size_is_the_mean_over_all_subsets_of_its_chains() -> None:
    # Three chains with two expansions each: heads 0 to 2, then two continuations of each chain in turn.
    specs = [(0, 2, 1.0), (0, 3, 0.0), (0, 2, 0.0)]
    heads = {0: 1, 1: 3, 2: 6}
    for chain, rewards in enumerate([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)]):
        specs += [(heads[chain], 1, rewards[0]), (0, 2, rewards[1])]
    tree = grown(*specs)
    curve = random_curve([tree], 3, 2)
    whole = curve[2].ratios()
    assert (whole["leaves"], whole["tokens"], whole["mixed"]) == (9, tree.num_action_tokens(), 1)
    # Alone, only the second chain has both outcomes; of the pairs, all have.
    assert curve[0].ratios()["mixed"] == pytest.approx(1 / 3)
    assert curve[1].ratios()["mixed"] == 1
    assert curve[0].ratios()["tokens"] == pytest.approx(whole["tokens"] / 3)
    assert curve[1].ratios()["tokens"] == pytest.approx(whole["tokens"] * 2 / 3)


def test_continuations_belong_to_the_chain_that_asked_for_them() -> None:
    assert [chain_of(number, 2, 3) for number in range(8)] == [0, 1, 0, 0, 0, 1, 1, 1]


def test_between_two_sizes_a_share_of_the_prompts_has_the_larger_one() -> None:
    curve = [Sums(prompts=2, leaves=2 * size, tokens=20 * size, mixed=size / 4) for size in (1, 2, 3)]

    def ratio(name: str, target: float, wanted: str) -> float:
        found = at(curve, name, target)
        assert found is not None
        return found.ratios()[wanted]

    assert (ratio("tokens", 25.0, "tokens"), ratio("tokens", 25.0, "leaves")) == (25.0, 2.5)
    assert ratio("tokens", 25.0, "mixed") == pytest.approx(2.5 / 8)
    assert ratio("leaves", 3.0, "tokens") == pytest.approx(30.0)
    assert ratio("tokens", 4.0, "leaves") == 1, "never less than one"
    assert at(curve, "tokens", 31.0) is None, "more than was ever run"


def test_trees_that_cannot_tell_are_refused() -> None:
    tree = grown((0, 1, 1.0), (0, 1, 0.0))
    with pytest.raises(ValueError, match="says nothing of 3"):
        flat_curve([tree], 3)
    with pytest.raises(ValueError, match="not one of 2 chains"):
        random_curve([tree], 2, 2)


def test_the_curve_of_several_trees_is_the_sum_over_them() -> None:
    trees = [grown((0, 1, 1.0), (0, 1, 0.0)), grown((0, 2, 1.0), (0, 1, 1.0))]
    both = flat_curve(trees, 2)
    assert both == [add(flat_curve([tree], 2)[size] for tree in trees) for size in range(2)]
