"""A rule's draws: keyed on (run seed, tree, decision), the same whatever arrived in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from allocator.rules.base import Draws


class SeededDraws(Draws):
    """Draws from one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def index(self, count: int) -> int:
        return self._random.randrange(count)

    def weighted(self, weights: Sequence[float]) -> int:
        sums = list(accumulate(weights))
        point = self._random.random() * sums[-1]
        positive = [i for i, weight in enumerate(weights) if weight > 0]
        return next((i for i in positive if point < sums[i]), positive[-1])
