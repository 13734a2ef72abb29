"""What several rules read off a view."""

from __future__ import annotations

from collections.abc import Iterable

from allocator.rules.base import BranchView, Scored
from common.nouns import ROOT, Node, RewardSource
from common.prefix import mean_of


def returned(branch: BranchView) -> float | None:
    """How a continuation ended, in [0, 1], by the environment's word; None as long as that is not known."""
    outcome = branch.outcome
    if outcome is None or outcome.source is not RewardSource.ENVIRONMENT:
        return None
    return min(1.0, max(0.0, outcome.raw_reward))


def blank(branches: Iterable[BranchView]) -> bool:
    """Whether one of them is outstanding and has not a single turn yet."""
    return any(not branch.nodes and not branch.ended for branch in branches)


def mean_entropy(node: Node) -> float | None:
    """Mean entropy of a turn's tokens, nats; None where the engine gave none."""
    return mean_of(node.turn.entropies)


def surprisal(node: Node) -> float | None:
    """Mean of −log p over the tokens of a turn, nats; None for a turn without tokens."""
    mean = mean_of(node.turn.logprobs)
    return None if mean is None else -mean


def best_first(scored: Iterable[Scored]) -> list[Scored]:
    """Highest total first, equal ones in the order given."""
    return sorted(scored, key=lambda each: -each.total)


def from_the_prompt(missing: int) -> list[Scored]:
    """The explanation of continuations that start at the prompt without anything being weighed."""
    return [Scored(ROOT, 1.0, {"missing": float(missing)})]
