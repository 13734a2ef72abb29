"""The two staleness bounds, defined once: score age D at the allocator, policy lag K at the learner."""

from __future__ import annotations

from common.nouns import Version

INFINITELY_STALE = 1 << 62
"""Lag of a version from an abandoned lineage."""


def policy_lag(current: Version, sampled: Version, resumed_from: int = 0) -> int:
    """Updates between the weights a token was sampled under and the current ones.

    `resumed_from` is the step at which the current lineage resumed: older lineages share history up to there;
    their later steps were abandoned and are infinitely stale.
    """
    if sampled.lineage > current.lineage:
        return INFINITELY_STALE
    if sampled.lineage < current.lineage and sampled.step > resumed_from:
        return INFINITELY_STALE
    return max(0, current.step - sampled.step)


def oldest_allowed(current: Version, max_lag: int) -> int:
    """Oldest step that is still trained at `current`."""
    return max(0, current.step - max_lag)


def work_ahead(step: int, max_lag: int, batch: int, accepted: int, running: int) -> int:
    """Trees that may still be opened (may be negative): `(step + K + 1)·batch − (accepted + running)`.

    `accepted` counts trees trained or queued; whatever is dropped leaves the sum at once. See AReaL
    (arXiv 2505.24298) §5.1. With K = 0 exactly one batch is in the making, which is the synchronous loop.
    """
    return (step + max_lag + 1) * batch - (accepted + running)


def score_age(stamp: int, clock: int, outstanding: int) -> int:
    """Events that a score has not seen: those that happened since its stamp, and those still outstanding.

    `clock` counts the events its rule reads; `outstanding` is one per kind that a running continuation of
    another decision may bring. A rule that reads nothing has clock and outstanding 0, hence age 0.
    """
    return (clock - stamp) + outstanding
