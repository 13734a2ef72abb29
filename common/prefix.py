"""What may be known of a prefix before its next turn is sampled: the input of the success predictor.

Everything here is fixed by the past: the turn that ends the prefix, and how the continuations of its tree had
ended when the prediction was made. A baseline computed from it leaves the policy gradient unbiased.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from common.nouns import Node, floats


@dataclass(frozen=True, slots=True)
class Tally:
    """Finished continuations with an outcome from the environment, and the sum of their returns in [0, 1]."""

    wins: float = 0.0
    trials: int = 0

    def plus(self, outcome: float) -> Tally:
        return Tally(self.wins + outcome, self.trials + 1)


EMPTY = Tally()


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as the predictor sees it. None = unknown, which is not zero."""

    depth: int
    """Turns from the root."""
    process_score: float | None = None
    """The environment's own, in [0, 1]."""
    entropy: float | None = None
    """Mean entropy of the last turn's tokens, nats; None at a root."""
    tokens: int = 0
    """Action tokens of the last turn."""
    features: bytes | None = None
    """float32 `[F]` of the engine."""
    tree: Tally = EMPTY
    """Outcomes in the whole tree."""
    below: Tally = EMPTY
    """Outcomes of the continuations that passed through, or started from, the end of this prefix."""


def describe(node: Node, tree: Tally = EMPTY, below: Tally = EMPTY) -> Prefix:
    """The prefix that ends with `node`."""
    turn = node.turn
    entropies = floats(turn.entropies)
    return Prefix(
        depth=node.depth,
        process_score=turn.process_score,
        entropy=math.fsum(entropies.tolist()) / len(entropies) if len(entropies) else None,
        tokens=turn.num_action_tokens,
        features=turn.features,
        tree=tree,
        below=below,
    )
