"""What a simulated fleet is like, and what goes wrong in it. See `benchmarks.fleet`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Probabilities per message or event, and mean times in seconds."""

    lost: float = 0.0
    """A message never arrives (its sender repeats it)."""
    duplicated: float = 0.0
    reordered: float = 0.0
    """A message overtakes later ones no more: it arrives a turn late."""
    failed: float = 0.0
    """A turn fails and its lease is reported as `Failed(retry)`."""
    declined: float = 0.0
    actor_life_s: float = 0.0
    """Mean time to a crash of an actor, after which a new incarnation says hello; 0 = never."""
    actor_pause: float = 0.0
    """Probability, per turn, that the actor freezes for `pause_s`."""
    pause_s: float = 15.0
    learner_life_s: float = 0.0
    tree_stale: float = 0.0
    """The learner drops a tree instead of queueing it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetConfig:
    """What to simulate. Durations in simulated seconds."""

    actors: int = 1000
    slots: int = 4
    prefetch: int = 2
    turn_s: float = 1.0
    """Mean time of a turn; how it is spread is the world's to say."""
    latency_s: float = 0.005
    max_turns: int = 6
    """Of an episode in the coin world."""
    step_s: float = 2.0
    """One update of the learner."""
    commit_every: int = 5
    credit: int = 0
    """Trees the learner holds at once; 0 = two batches."""
    beat_s: float = 1.0
    """Time between two heartbeats of a peer."""
    resend_s: float = 2.0
    tick_s: float = 0.25
    join_over_s: float = 2.0
    """Actors say hello spread over this time."""
    faults: Faults = field(default_factory=Faults)
