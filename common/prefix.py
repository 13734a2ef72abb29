"""What may be known of a prefix before its next turn is sampled: the input of the success predictor.

Everything here is fixed by the past: the turn that ends the prefix, and how the continuations of its tree had
ended when the prediction was made. A baseline computed from it leaves the policy gradient unbiased.
"""

from __future__ import annotations

import math
import struct

import msgspec

from common.nouns import Node

GRAIN = 1 << 30
"""Outcomes count in multiples of 2^-30: such sums are exact, hence the same in any order of arrival."""


class Tally(msgspec.Struct, frozen=True, gc=False):
    """Finished continuations with an outcome from the environment, and the sum of their returns in [0, 1]."""

    wins: float = 0.0
    trials: int = 0

    def plus(self, outcome: float) -> Tally:
        return Tally(self.wins + round(outcome * GRAIN) / GRAIN, self.trials + 1)


EMPTY = Tally()


class Prefix(msgspec.Struct, frozen=True, gc=False):
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

    def after(self, tree: Tally, below: Tally) -> Prefix:
        """The same prefix, after other outcomes."""
        return Prefix(self.depth, self.process_score, self.entropy, self.tokens, self.features, tree, below)


def describe(node: Node, tree: Tally = EMPTY, below: Tally = EMPTY) -> Prefix:
    """The prefix that ends with `node`."""
    turn = node.turn
    return Prefix(
        depth=node.depth,
        process_score=turn.process_score,
        entropy=mean_of(turn.entropies),
        tokens=turn.num_action_tokens,
        features=turn.features,
        tree=tree,
        below=below,
    )


def mean_of(data: bytes) -> float | None:
    """Mean of little-endian float32 bytes, None where there are none. For a turn's few numbers faster than an
    array."""
    count = len(data) // 4
    return math.fsum(struct.unpack(f"<{count}f", data)) / count if count else None
