"""Maps of FrozenLake: layout, split, and the ways to the goal.

A map is rows of `S` start, `F` frozen, `H` hole, `G` goal. Squares are numbered row by row from the top
left, as gymnasium numbers them, and named `a1`, `b1`, ...: column letter, row number.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from functools import cached_property

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""(row, column) change of gymnasium's actions 0..3: left, down, right, up."""
EVAL_SHARE = 5
"""One layout in five is held out: enough held-out maps on a 4x4 lake, little lost to training."""


@dataclass(frozen=True)
class Lake:
    """One layout. Example: `Lake(("SF", "HG"))`."""

    rows: tuple[str, ...]

    @classmethod
    def open(cls, size: int) -> Lake:
        """The lake of side `size` without holes."""
        letters = ["F"] * (size * size)
        letters[0], letters[-1] = "S", "G"
        text = "".join(letters)
        return cls(tuple(text[row * size : (row + 1) * size] for row in range(size)))

    def is_sound(self) -> bool:
        """True if the rows form a square of the four letters with start and goal in their corners."""
        text = "".join(self.rows)
        square = all(len(row) == len(self.rows) for row in self.rows)
        inner = set(text[1:-1]) <= {"F", "H"}
        return square and len(text) > 1 and text[0] == "S" and text[-1] == "G" and inner

    @cached_property
    def squares(self) -> tuple[str, ...]:
        """Names of the squares in the order of their numbers."""
        size = len(self.rows)
        return tuple(f"{chr(ord('a') + column)}{row + 1}" for row in range(size) for column in range(size))

    @cached_property
    def holes(self) -> frozenset[int]:
        """Numbers of the holes."""
        return frozenset(number for number, letter in enumerate("".join(self.rows)) if letter == "H")

    @property
    def goal(self) -> int:
        """Number of the goal: the last square."""
        return len(self.rows) ** 2 - 1

    def move(self, square: int, action: int) -> int:
        """Where `action` leads from `square` without slipping; walls hold."""
        size = len(self.rows)
        row, column = divmod(square, size)
        row = min(max(row + MOVES[action][0], 0), size - 1)
        column = min(max(column + MOVES[action][1], 0), size - 1)
        return row * size + column

    @cached_property
    def distances(self) -> dict[int, int]:
        """Fewest moves to the goal around the holes; squares that cannot reach it are absent."""
        # Moves between frozen squares can be undone, so the search may start at the goal.
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            square = queue.popleft()
            for action in range(len(MOVES)):
                other = self.move(square, action)
                if other not in found and other not in self.holes:
                    found[other] = found[square] + 1
                    queue.append(other)
        return found

    def best_actions(self, square: int) -> list[int]:
        """Actions that shorten the way to the goal from `square`, in gymnasium's order."""
        if square not in self.distances:
            return []
        nearer = self.distances[square] - 1
        return [
            action for action in range(len(MOVES)) if self.distances.get(self.move(square, action)) == nearer
        ]


def split_of(lake: Lake) -> str:
    """`eval` or `train`, decided by the layout alone, so that no layout can be in both."""
    digest = hashlib.blake2b("/".join(lake.rows).encode(), digest_size=8).digest()
    return "eval" if int.from_bytes(digest, "little") % EVAL_SHARE == 0 else "train"
