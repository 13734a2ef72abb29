"""Controls: variants of a batch from which nothing can be learnt, to show what is no result."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from common.nouns import Outcome, Tree
from common.seeds import derive_seed


def shuffle_rewards(trees: Sequence[Tree], run_seed: int, step: int) -> list[Tree]:
    """The trees with their outcomes permuted across all continuations of the batch.

    Tokens, baselines and weights stay where they are, and the batch's set of outcomes stays what it was; who
    is paid which is drawn anew for each step. Continuations without an outcome stay without.
    """
    ordered = sorted(trees, key=lambda tree: tree.id)
    outcomes = [leaf.outcome for tree in ordered for leaf in tree.leaves()]
    random.Random(derive_seed("shuffle_rewards", run_seed, step)).shuffle(outcomes)
    rest = iter(outcomes)
    return [_with_outcomes(tree, rest) for tree in ordered]


def _with_outcomes(tree: Tree, outcomes: Iterator[Outcome | None]) -> Tree:
    continuations = [
        c if c.outcome is None else msgspec.structs.replace(c, outcome=next(outcomes))
        for c in tree.continuations
    ]
    return msgspec.structs.replace(tree, continuations=continuations)
