"""The leaves of one prompt as a group: what they earned, and whether there is anything to compare.

Contrast is decided for each group on its own, by comparing raw rewards with a tolerance, and never by a
standard deviation: that of equal rewards is the noise of its own rounding, which an ε would blow up, and that
of a batch says nothing about a group (a uniform group in a varied batch has no contrast). Raw, because
shaping breaks ties between outcomes that are the same (a length penalty makes seven failures differ).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.nouns import Continuation, Node, Tree
from learner.credit.base import branch_reward, branch_turns


@dataclass(frozen=True, slots=True)
class Group:
    """Branches with an outcome, in the tree's order, `[n]` each. Whatever has no outcome is not in it."""

    leaves: tuple[Continuation, ...]
    branches: tuple[tuple[Node, ...], ...]
    rewards: tuple[float, ...]
    """What the whole branch earned, from the prompt to the leaf."""
    raw: tuple[float, ...]
    """The same by the environment's word."""

    def __len__(self) -> int:
        return len(self.leaves)

    def has_contrast(self, tolerance: float) -> bool:
        """Whether its rewards differ by more than `tolerance`, raw and shaped."""
        return differ(self.raw, tolerance) and differ(self.rewards, tolerance)


def group_of(tree: Tree) -> Group:
    """The leaves of a tree.

    Raises:
        ValueError: a reward is not finite (`branch_reward`).
    """
    leaves = tuple(tree.leaves())
    branches = tuple(branch_turns(tree, leaf) for leaf in leaves)
    pairs = list(zip(branches, leaves, strict=True))
    return Group(
        leaves,
        branches,
        tuple(branch_reward(turns, leaf) for turns, leaf in pairs),
        tuple(branch_reward(turns, leaf, raw=True) for turns, leaf in pairs),
    )


def differ(values: Sequence[float], tolerance: float) -> bool:
    """Whether any two values are further apart than `tolerance`; one value, or none, never is.

    Raises:
        ValueError: a value is NaN, which is neither near nor far.
    """
    if any(math.isnan(value) for value in values):
        raise ValueError(f"rewards {list(values)} hold a NaN; expected numbers")
    return len(values) > 1 and max(values) - min(values) > tolerance


def centred(rewards: Sequence[float]) -> list[float]:
    """r − mean, `[n]`."""
    mean = math.fsum(rewards) / max(1, len(rewards))
    return [reward - mean for reward in rewards]


def bessel_std(rewards: Sequence[float]) -> float:
    """Standard deviation with n − 1, in two passes: E[x²] − E[x]² cancels. Two rewards at least."""
    return math.sqrt(math.fsum(part**2 for part in centred(rewards)) / (len(rewards) - 1))
