"""Where the tokens of packed trees stand: depth first, so that one integer a token says who may look at it.

    rows of a tree ─ split under a budget ─▶ groups ─ lay_out ─▶ places ─ fill ─▶ lines

Nodes are laid out depth first: the tokens below a node follow it without a gap. A token at place q may then
look at the token at place k exactly where `k <= q < ends[k]`, `ends[k]` being the place after the last token
below k. Several trees in one line keep apart by the same rule: the tokens of one all end before the next.

A *path* is what a branch walks through: its nodes from the root on, with the tokens it holds of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from learner.rows import Row

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Path:
    """One branch's input tokens by node. The last token of a row is only a target, never an input."""

    nodes: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each; only the last node's may be fewer than the node has."""

    @property
    def length(self) -> int:
        return sum(self.lengths)


def path_of(row: Row) -> Path:
    """The walk of a row's input tokens."""
    inputs = row.nodes[: row.length - 1]
    starts = np.flatnonzero(np.diff(inputs, prepend=-1))
    lengths = np.diff(starts, append=len(inputs))
    return Path(tuple(inputs[starts].tolist()), tuple(lengths.tolist()))


# ------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the merged paths of one tree stand."""

    starts: dict[int, int]
    """Place of each node's first token."""
    ends: Ints
    """`[T]` place after the last token that may look at this one."""

    @property
    def length(self) -> int:
        return len(self.ends)

    def places(self, path: Path) -> Ints:
        """Where the tokens of a path stand, `[its length]`, ascending."""
        parts = [
            np.arange(self.starts[node], self.starts[node] + length, dtype=np.int64)
            for node, length in zip(path.nodes, path.lengths, strict=True)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def lay_out(paths: Iterable[Path]) -> Layout:
    """Merge paths of one tree: each node once, as many of its tokens as the longest of the paths holds.

    Depth first without recursion, since trees are as deep as an episode is long; children in the order of
    their index.
    """
    lengths: dict[int, int] = {}
    children: dict[int | None, set[int]] = {}
    for path in paths:
        parent: int | None = None
        for node, length in zip(path.nodes, path.lengths, strict=True):
            lengths[node] = max(length, lengths.get(node, 0))
            children.setdefault(parent, set()).add(node)
            parent = node
    starts: dict[int, int] = {}
    ends = np.zeros(sum(lengths.values()), np.int64)
    at, stack = 0, [(node, False) for node in sorted(children.get(None, ()), reverse=True)]
    while stack:
        node, below_done = stack.pop()
        if below_done:
            ends[starts[node] : starts[node] + lengths[node]] = at
            continue
        starts[node] = at
        at += lengths[node]
        stack.append((node, True))
        stack += [(child, False) for child in sorted(children.get(node, ()), reverse=True)]
    return Layout(starts, ends)


# --------------------------------------------------------------------------------------- groups and lines


def split(paths: Sequence[Path], max_tokens: int) -> list[list[int]]:
    """Indices of the paths of one tree, in groups of at most `max_tokens` merged tokens each.

    Paths come in depth-first order, so that those of a group share as much as they can. What they share with
    another group is computed there again: coefficients are sums over branches, which add up to the same
    gradient. A path that is longer than the budget comes alone.
    """
    groups: list[list[int]] = []
    held: dict[int, int] = {}
    total = 0
    for index in sorted(range(len(paths)), key=lambda index: (paths[index].nodes, index)):
        lengths = dict(zip(paths[index].nodes, paths[index].lengths, strict=True))
        more = sum(max(0, length - held.get(node, 0)) for node, length in lengths.items())
        if not groups or total + more > max_tokens:
            groups.append([])
            held, total, more = {}, 0, paths[index].length
        groups[-1].append(index)
        total += more
        held |= {node: max(length, held.get(node, 0)) for node, length in lengths.items()}
    return groups


def fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of groups by line of at most `max_tokens`: the longest first, each into the first line with
    room. A longer one comes alone."""
    lines: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        line = next((line for line, left in enumerate(room) if lengths[index] <= left), None)
        if line is None:
            lines.append([index])
            room.append(max_tokens - lengths[index])
        else:
            lines[line].append(index)
            room[line] -= lengths[index]
    return lines


# ------------------------------------------------------------------------------------------------- chunks


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that attend together: `start` to `stop` look at the tokens of `ranges` before them, and at each
    other."""

    start: int
    stop: int
    ranges: tuple[tuple[int, int], ...]
    """Places before `start` that some token of the chunk sees, as [from, to) without gaps between two."""
    branched: bool
    """Whether some token of the chunk does not see all of the chunk before it."""

    @property
    def keys(self) -> int:
        return sum(to - since for since, to in self.ranges) + self.stop - self.start

    @property
    def pairs(self) -> int:
        """Pairs of tokens that the kernel goes through; it skips the future of a plain causal chunk."""
        causal = not self.ranges and not self.branched
        return (self.stop - self.start) * self.keys // (2 if causal else 1)


MAX_QUERIES = 512
"""Longest piece of a run below a fork: all its tokens meet all keys of the piece, also those after them."""
PAIRS_A_CHUNK = 1 << 14
"""What a call of the attention kernel costs beside its pairs, in pairs: a chunk may waste as many to save
a call."""


def chunks(ends: Ints) -> list[Chunk]:
    """Cut a line so that few pairs are computed which the mask then throws away.

    A *run* goes down to one leaf: within it attention is plainly causal, and all of it sees the same tokens
    before it. Short runs side by side are merged where a masked pair is cheaper than another call.

    Args:
        ends: `[T]` of the line.
    """
    length = len(ends)
    if not length:
        return []
    leaves = np.flatnonzero(ends == np.arange(1, length + 1)) + 1
    borders = [0, *(int(place) for place in leaves)]
    merged: list[Chunk] = []
    for start, stop in pairwise(borders):
        for begin, end in _pieces(ends, start, stop):
            chunk = _chunk(ends, begin, end, branched=False)
            if merged:
                both = _chunk(ends, merged[-1].start, end, branched=merged[-1].branched or begin == start)
                if both.pairs <= merged[-1].pairs + chunk.pairs + PAIRS_A_CHUNK:
                    merged[-1] = both
                    continue
            merged.append(chunk)
    return merged


def _pieces(ends: Ints, start: int, stop: int) -> Iterable[tuple[int, int]]:
    """A run in pieces; whole where nothing before it is seen, since the kernel then skips the future."""
    size = MAX_QUERIES if np.any(ends[:start] > start) else stop - start
    return ((begin, min(begin + size, stop)) for begin in range(start, stop, size))


def _chunk(ends: Ints, start: int, stop: int, branched: bool) -> Chunk:
    seen = np.concatenate([[False], ends[:start] > start, [False]])
    borders = np.flatnonzero(seen[1:] != seen[:-1])
    ranges = tuple((int(since), int(to)) for since, to in borders.reshape(-1, 2))
    return Chunk(start, stop, ranges, branched)
