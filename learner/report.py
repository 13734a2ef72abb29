"""Numbers of a training step: for the tracker, the log line, and the progress line of role=local."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.logs import fields
from common.nouns import Tree
from learner.queue import Drop
from learner.update import UpdateReport

LOG = logging.getLogger("treeward.learner")


@dataclass(slots=True)
class Stopwatch:
    """Seconds by what they were spent on, since the last `lap`."""

    seconds: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    """The same, of all laps together."""
    _lap_at: float = field(default_factory=time.monotonic)

    def spend(self, on: str, seconds: float) -> None:
        """Add to a purpose."""
        for book in (self.seconds, self.totals):
            book[on] = book.get(on, 0.0) + seconds

    def timed(self, on: str) -> Timed:
        """`with stopwatch.timed("train_s"): …`"""
        return Timed(self, on)

    def lap(self) -> dict[str, float]:
        """Seconds of this lap by purpose, with `step_s` its whole length; starts the next."""
        now = time.monotonic()
        found = {**self.seconds, "step_s": now - self._lap_at}
        self.seconds, self._lap_at = {}, now
        return found


class Timed:
    """Adds the length of a `with` block to a stopwatch."""

    def __init__(self, watch: Stopwatch, on: str) -> None:
        self._watch, self._on = watch, on

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._watch.spend(self._on, time.monotonic() - self._began)


def outcome_metrics(trees: Sequence[Tree]) -> dict[str, float]:
    """Of a batch, from raw rewards: `success` is the mean over its continuations, `mixed` the share of its
    prompts with more than one outcome."""
    rewards = [[c.outcome.raw_reward for c in tree.leaves() if c.outcome is not None] for tree in trees]
    flat = [reward for group in rewards for reward in group]
    return {
        "success": sum(flat) / max(1, len(flat)),
        "mixed": sum(len(set(group)) > 1 for group in rewards) / max(1, len(rewards)),
        "continuations": len(flat),
    }


def count_metrics(report: UpdateReport) -> dict[str, float]:
    """Where the batch's tokens and branches went.

    `stale_branch_success` is no fair sample of branches: one with all its tokens stale is short by
    construction (it ended before newer weights came), and short branches differ in success anyway.
    """
    counts, stale = report.counts, max(1, report.counts.stale_branches)
    return {
        "tokens_generated": counts.tokens_generated,
        "tokens_trained": counts.tokens_trained,
        "tokens_without_contrast": counts.tokens_without_contrast,
        "tokens_stale": counts.tokens_stale,
        "tokens_without_credit": counts.tokens_without_credit,
        "tokens_demonstrated": counts.tokens_demonstrated,
        "branch_tokens": counts.tokens_generated / max(1, counts.branches),
        "stale_branches": counts.stale_branches,
        "stale_branch_tokens": counts.stale_branch_tokens / stale,
        "stale_branch_success": counts.stale_branch_reward / stale,
        "minibatches_skipped": report.minibatches_skipped,
    }


def dropped_metrics(stale: Sequence[Drop]) -> dict[str, float]:
    """Means over the branches of trees that were dropped as stale, which the batch's numbers lack: whether
    the gate filters by length or success. Empty where none were. They too are short by construction."""
    branches = sum(drop.branches for drop in stale)
    if not branches:
        return {}
    return {
        "dropped_tree_branches": branches,
        "dropped_tree_success": sum(drop.branch_reward for drop in stale) / branches,
        "dropped_tree_turns": sum(drop.branch_turns for drop in stale) / branches,
        "dropped_tree_tokens": sum(drop.branch_tokens for drop in stale) / branches,
    }


def step_metrics(
    trees: Sequence[Tree],
    report: UpdateReport,
    times: Mapping[str, float],
    dropped: Mapping[str, int],
    stale: Sequence[Drop] = (),
) -> dict[str, float]:
    """Everything there is to say about one step.

    Args:
        trees: of the batch.
        report: of the update on it.
        times: seconds by purpose.
        dropped: trees dropped since this start, by reason.
        stale: those dropped as stale since the step before.
    """
    step_s = max(1e-9, times["step_s"])
    found = {**outcome_metrics(trees), **count_metrics(report), **report.metrics, **times}
    found.update(dropped_metrics(stale))
    found.update({f"trees_dropped_{reason}": count for reason, count in dropped.items()})
    found["trees_per_s"] = len(trees) / step_s
    found["tokens_per_s"] = report.counts.tokens_generated / step_s
    found["lag"] = report.metrics.get("lag_mean", 0.0)
    return found


PROGRESS = ("success", "trees_per_s", "tokens_per_s", "lag")
"""What role=local shows while it trains."""


def log_step(step: int, steps: int, metrics: Mapping[str, float]) -> None:
    """One line for a person, and a `progress` event for who follows the log."""
    waited = metrics.get("wait_trees_s", 0.0) + metrics.get("wait_allocator_s", 0.0)
    LOG.info(
        "step %d/%d  success %.3f  mixed %.2f  loss %+.4f  grad %.3f  entropy %.3f  ess %.3f  clip %.3f  "
        "lag %.2f  gap %.1e  tokens %d/%d  waited %.1fs trained %.1fs  queued %d",
        step, steps, metrics["success"], metrics["mixed"], metrics["loss"], metrics["grad_norm"],
        metrics.get("entropy", 0.0), metrics.get("ratio_ess", 1.0), metrics.get("clip_fraction", 0.0),
        metrics["lag"], metrics.get("logprob_gap", 0.0), metrics["tokens_trained"],
        metrics["tokens_generated"], waited, metrics.get("train_s", 0.0), metrics.get("trees_queued", 0.0),
        extra=fields("progress", step=step, **{name: round(metrics[name], 4) for name in PROGRESS}),
    )  # fmt: skip
