"""The figures of one run of the ring, from its accounts: rates, waits and bytes. Pure arithmetic.

Every share is of wall time in the window. `actor_wait` is the mean over actors of the time without a lease to
run: none granted, or none that may start under the weights held. `learner_wait` is the time without a full
batch. Bytes are counted once each, where they are received, and metrics where they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.accounts import Account, Accounts, Window
from benchmarks.results import BenchmarkFailed

HEADLINE = (
    "rollout_tokens_per_s",
    "learner_tokens_per_s",
    "actor_wait",
    "learner_wait",
    "wire_bytes_per_token",
)
ACTOR_WAITS = ("leases", "weights")
LEARNER_WAITS = ("wait_trees_s", "wait_allocator_s")


def figures(accounts: Accounts) -> dict[str, Any]:
    """All figures of a run, JSON-ready.

    Raises:
        BenchmarkFailed: nothing was trained in the window.
    """
    window, tokens = accounts.window, accounts.tokens
    if window.seconds <= 0 or not tokens.trained:
        raise BenchmarkFailed("nothing was trained between the first and the last update: train longer")
    actors = [actor_shares(actor, window) for actor in accounts.actors]
    learner = learner_shares(accounts.learner, window)
    wire = wire_bytes(accounts)
    training_s = accounts.learner.seconds(window, "train_s")
    return {
        "rollout_tokens_per_s": tokens.accepted / window.seconds,
        "learner_tokens_per_s": tokens.trained / max(1e-9, training_s),
        "learner_tokens_per_wall_s": tokens.trained / window.seconds,
        "actor_wait": mean([sum(actor[name] for name in ACTOR_WAITS) for actor in actors]),
        "learner_wait": learner["trees"] + learner["allocator"],
        "wire_bytes_per_token": wire["total"] / tokens.trained,
        "window_s": window.seconds,
        "ramp_up_s": accounts.ramp_up_s,
        "updates": accounts.updates,
        "tokens": {
            "sampled": tokens.sampled,
            "accepted": tokens.accepted,
            "crossed": tokens.crossed,
            "discarded": tokens.discarded,
            "trained": tokens.trained,
            "context": tokens.context,
            "turns": tokens.turns,
            "episodes": tokens.episodes,
        },
        "actors": {actor.name: shares for actor, shares in zip(accounts.actors, actors, strict=True)},
        "learner": learner,
        "allocator": allocator_shares(accounts.allocator, window),
        "wire": wire,
    }


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def actor_shares(actor: Account, window: Window) -> dict[str, float]:
    """Shares of an actor: waiting for leases or weights, generating, and what else it does while leases run
    (environments, messages, journal); `cpu` beside them."""
    engine_s = actor.between(window, lambda fields: float(fields["engine_s"]))
    work_s = actor.seconds(window, "work")
    seconds = {name: actor.seconds(window, name) for name in ACTOR_WAITS}
    seconds |= {"engine": engine_s, "other": work_s - engine_s, "cpu": actor.cpu_seconds(window)}
    return {name: spent / window.seconds for name, spent in seconds.items()}


def learner_shares(learner: Account, window: Window) -> dict[str, float]:
    """Shares of the learner: waiting for trees or the allocator, training, saving, publishing, other work."""
    names = {
        "trees": "wait_trees_s",
        "allocator": "wait_allocator_s",
        "train": "train_s",
        "save": "save_s",
        "publish": "publish_s",
    }
    shares = {name: learner.seconds(window, state) / window.seconds for name, state in names.items()}
    return {**shares, "other": 1 - sum(shares.values()), "cpu": learner.cpu_seconds(window) / window.seconds}


def allocator_shares(allocator: Account, window: Window) -> dict[str, float]:
    """Shares of the allocator: at work, idle, and of that, by what its core waited for."""
    shares = {
        "work": allocator.seconds(window, "working") / window.seconds,
        "idle": allocator.seconds(window, "waiting") / window.seconds,
        "cpu": allocator.cpu_seconds(window) / window.seconds,
    }
    for reason in allocator.states("waited"):
        shares[f"idle_{reason}"] = allocator.seconds(window, reason, "waited") / window.seconds
    return shares


def wire_bytes(accounts: Accounts) -> dict[str, float]:
    """Bytes by path in the window, their total, and the share of what was sent to the allocator that it has
    not received: a check of the counters, near zero."""
    window, at = accounts.window, accounts.endpoints
    allocator, learner, actors = accounts.allocator, accounts.learner, accounts.actors
    peers = [*actors, learner]
    home, weights = at["allocator"], at["weights"]
    paths = {
        "to_allocator": allocator.received(window, home),
        "to_actors": sum(actor.received(window, home) for actor in actors),
        "trees_to_learner": learner.received(window, home),
        "weights": sum(peer.received(window, weights) for peer in peers),
        "hints": sum(actor.received(window, at.get("hints", "")) for actor in actors),
        "metrics": sum(role.sent(window, at.get("tracker", "")) for role in (*peers, allocator)),
    }
    sent = sum(peer.sent(window, home) for peer in peers)
    return {
        **paths,
        "total": sum(paths.values()),
        "unmatched_share": (sent - paths["to_allocator"]) / max(1.0, sent),
    }


def spread(runs: Sequence[dict[str, Any]], name: str) -> float:
    """(largest − smallest) / mean of a figure over runs of one seed: smaller differences mean nothing."""
    values = [float(run[name]) for run in runs]
    return (max(values) - min(values)) / max(1e-12, mean(values))
