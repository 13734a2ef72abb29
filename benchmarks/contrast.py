"""What a set of finished trees is worth to a group-relative learner: contrast between outcomes, and its cost.

Of one tree with L leaves, of K of which the outcome is known, k of these successes, p̂ = k / K:

    mixed           0 < k < K. Over prompts: the mixed-outcome ratio, which is RIFB in its second definition
    mass            2 √(p̂ (1 − p̂)), the mean |advantage| of a z-scored group: RIFB in its first definition
    contrasting     L if mixed, else 0. Over all leaves: the effective contrast ratio, the share of sampled
                    continuations that lie in a group with both outcomes
    groups          anchors at which two or more outcomes meet: those of the continuations that started
                    there, and that of the continuation which passed through (its owner)
    mixed groups    those with both outcomes. Over groups: the anchor contrast

RIFB as in InfoTree (arXiv 2605.05262), reconstructed from its abstract. A leaf is a path that ended; only the
environment's word makes its outcome known, a success if it is at least one half. A path that a rule stopped,
as a failure or with a guess, was sampled, and counts as a leaf, but makes no group mixed: else a rule could
make contrast by stopping. (PATR keeps stopped paths in the group as failures; its own contrast is greater by
that.) Tokens are all action tokens of a tree. All of these are sums, so
that trees and seeds add up, and a mixture of budgets is a weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields

from common.nouns import NO_LEASE, ROOT, Continuation, RewardSource, Tree


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over trees; see the module docstring."""

    prompts: float = 0.0
    leaves: float = 0.0
    tokens: float = 0.0
    known: float = 0.0
    successes: float = 0.0
    mixed: float = 0.0
    mass: float = 0.0
    contrasting: float = 0.0
    groups: float = 0.0
    mixed_groups: float = 0.0

    def plus(self, other: Sums, share: float = 1.0) -> Sums:
        """This and `share` times the other."""
        return Sums(*(getattr(self, f.name) + share * getattr(other, f.name) for f in fields(Sums)))

    def ratios(self) -> dict[str, float]:
        """What is reported, each defined where anything was counted."""
        return {
            "mixed": self.mixed / self.prompts,
            "rifb": self.mass / self.prompts,
            "contrast": self.contrasting / self.leaves,
            "anchor_contrast": self.mixed_groups / self.groups if self.groups else 0.0,
            "success": self.successes / self.known if self.known else 0.0,
            "leaves": self.leaves / self.prompts,
            "tokens": self.tokens / self.prompts,
        }

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def add(trees: Iterable[Sums]) -> Sums:
    """All of them together."""
    total = Sums()
    for sums in trees:
        total = total.plus(sums)
    return total


def mixture(low: Sums, high: Sums, share: float) -> Sums:
    """Per prompt: the share `share` of prompts grown as in `high`, the others as in `low`."""
    empty = Sums()
    return empty.plus(low, (1 - share) / low.prompts).plus(high, share / high.prompts)


def success(leaf: Continuation) -> bool | None:
    """Whether a continuation succeeded; None where the environment has not said so."""
    outcome = leaf.outcome
    if outcome is None or outcome.source is not RewardSource.ENVIRONMENT:
        return None
    return outcome.raw_reward >= 0.5


def measure(tree: Tree) -> Sums:
    """One tree."""
    known = {c.number: won for c in tree.continuations if (won := success(c)) is not None}
    leaves, wins = sum(c.outcome is not None for c in tree.continuations), sum(known.values())
    mixed = 0 < wins < len(known)
    share = wins / len(known) if known else 0.0
    groups = anchor_groups(tree, known)
    return Sums(
        prompts=1, leaves=leaves, tokens=tree.num_action_tokens(), known=len(known), successes=wins,
        mixed=mixed, mass=2 * math.sqrt(share * (1 - share)), contrasting=leaves if mixed else 0,
        groups=len(groups), mixed_groups=sum(len(set(group)) == 2 for group in groups),
    )  # fmt: skip


def anchor_groups(tree: Tree, known: Mapping[int, bool]) -> list[list[bool]]:
    """Outcomes that meet at each anchor, where there are two or more.

    A path that waited at a horizon has no outcome of its own: its heirs have, and meet where they started.
    """
    started: dict[int, list[bool]] = {}
    for c in tree.continuations:
        if c.number in known:
            started.setdefault(c.anchor, []).append(known[c.number])
    for anchor, group in started.items():
        owner = tree.nodes[anchor].lease
        if anchor != ROOT and owner != NO_LEASE and owner in known:
            group.append(known[owner])
    return [group for group in started.values() if len(group) > 1]
