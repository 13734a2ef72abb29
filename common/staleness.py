"""The two staleness bounds, defined once: score age D at the allocator, policy lag K at the learner."""

from __future__ import annotations

from collections.abc import Sequence

from common.nouns import Version

INFINITELY_STALE = 1 << 62
"""Lag of a version that is no ancestor of the current weights: it belongs to an abandoned lineage."""


def policy_lag(current: Version, sampled: Version, resumed: Sequence[int] = (0,)) -> int:
    """Updates between the weights a token was sampled under and the current ones.

    `resumed[L]` is the step at which lineage L resumed, `[lineages]`. A version of an older lineage is an
    ancestor of the current weights only if no lineage since began before it: its step is at most
    min(resumed[sampled.lineage + 1 … current.lineage]). Later steps were abandoned, and so counts everything
    older than the current lineage where the list does not reach up to it.
    """
    if sampled.lineage > current.lineage:
        return INFINITELY_STALE
    if sampled.lineage < current.lineage:
        since = resumed[sampled.lineage + 1 : current.lineage + 1]
        if len(since) < current.lineage - sampled.lineage or sampled.step > min(since):
            return INFINITELY_STALE
    return max(0, current.step - sampled.step)


def oldest_allowed(current: Version, max_lag: int) -> int:
    """Oldest step that is still trained by the update made at `current`.

    For work that is trained later, `current` is the step it will be trained at, not the newest there is.
    """
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
