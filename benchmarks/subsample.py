"""Flat and random sampling at any number of continuations, from trees that were grown with more of them.

Continuations of a flat tree are independent draws, so every subset of them is a flat tree; chains of
Tree-GRPO's rule are independent trees, so every subset of chains is a random tree. Means over all subsets of
a size are exact. One run thus gives a baseline at the tokens of any other arm, with less noise than a run of
that size. A curve is the sums over all trees at the sizes 1, 2, … (continuations, or chains).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import msgspec

from benchmarks.contrast import Sums, add, measure, mixture, success
from common.nouns import Tree

TOLERANCE = 1e-9
"""A size that has the target but for rounding has it."""


def flat_curve(trees: Sequence[Tree], most: int) -> list[Sums]:
    """Flat sampling with 1 to `most` continuations, `[most]`.

    Raises:
        ValueError: a tree has fewer.
    """
    return [add(_flat(tree, size) for tree in trees) for size in range(1, most + 1)]


def random_curve(trees: Sequence[Tree], chains: int, expansions: int) -> list[Sums]:
    """The rule `random` (one round) with 1 to `chains` chains, `[chains]`.

    Raises:
        ValueError: a tree has other numbers of them.
    """
    for tree in trees:
        if len(tree.continuations) != chains * (1 + expansions):
            raise ValueError(
                f"tree {tree.id} is not one of {chains} chains with {expansions} expansions each"
            )
    return [add(_random(tree, size, chains, expansions) for tree in trees) for size in range(1, chains + 1)]


def at(curve: Sequence[Sums], name: str, target: float) -> Sums | None:
    """Per prompt: the mixture of two neighbouring sizes whose mean `name` (`tokens`, `leaves`) is `target`.

    Never less than the smallest size; None where even the largest one has less than the target.
    """
    means = [getattr(sums, name) / sums.prompts for sums in curve]
    high = next((place for place, mean in enumerate(means) if mean >= target * (1 - TOLERANCE)), None)
    if high is None:
        return None
    low = max(0, high - 1)
    width = means[high] - means[low]
    share = (target - means[low]) / width if width > 0 else 0.0
    return mixture(curve[low], curve[high], min(1.0, max(0.0, share)))


def _flat(tree: Tree, size: int) -> Sums:
    """A flat tree with `size` of its continuations: successes are hypergeometric."""
    known = [won for c in tree.continuations if (won := success(c)) is not None]
    total, wins = len(known), sum(known)
    if size > total:
        raise ValueError(f"tree {tree.id} has {total} continuations, that says nothing of {size}")
    subsets = math.comb(total, size)
    chances = {k: math.comb(wins, k) * math.comb(total - wins, size - k) / subsets for k in range(size + 1)}
    mixed = sum(chance for k, chance in chances.items() if 0 < k < size)
    several = float(size > 1)
    return Sums(
        prompts=1, leaves=size, tokens=tree.num_action_tokens() * size / total, known=size,
        successes=wins * size / total, mixed=mixed,
        mass=sum(chance * 2 * math.sqrt(k * (size - k)) / size for k, chance in chances.items()),
        contrasting=size * mixed, groups=several, mixed_groups=several * mixed,
    )  # fmt: skip


def _random(tree: Tree, size: int, chains: int, expansions: int) -> Sums:
    """The mean over all subsets of its chains."""
    parts = [
        _part(tree, {n for n in range(len(tree.continuations)) if chain_of(n, chains, expansions) in subset})
        for subset in combinations(range(chains), size)
    ]
    return Sums().plus(add(parts), 1 / len(parts))


def _part(tree: Tree, numbers: set[int]) -> Sums:
    """What these continuations alone are worth; none of them starts at a turn of another one."""
    kept = [c for c in tree.continuations if c.number in numbers]
    sampled = sum(tree.nodes[index].turn.num_action_tokens for c in kept for index in c.nodes)
    return replace(measure(msgspec.structs.replace(tree, continuations=kept)), tokens=sampled)


def chain_of(number: int, chains: int, expansions: int) -> int:
    """Which chain a continuation belongs to: the heads come first, then each chain's expansions."""
    return number if number < chains else (number - chains) // expansions
