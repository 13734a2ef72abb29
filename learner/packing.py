"""Rows to packed trees: the branches of a tree as one sequence in which every token is computed once.

    rows of one tree ─ merged by node ─▶ Packed ─ several, end to end ─▶ one line of a micro-batch

What shared tokens are worth is kept as *pairs* of a token and a branch that trains it. A clipped loss is
linear in the advantage on either side of zero, but not across it, so that the sums of positive and of
negative coefficients, apart, give the gradient of branch-by-branch training exactly; terms without an
advantage need the summed weight; losses of whole branches or turns need the pairs themselves. A prefix that
two groups of the same tree repeat is trained by the branches of each: the sums add up.

Shapes: T tokens of the packed sequence, N trained tokens (each once), M pairs, B branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from learner.layout import Layout, Path, lay_out, path_of, split
from learner.rows import Floats, Ints, Row

MIN_SHARING = 1.02
"""Tokens of the rows / tokens of the packed tree under which packing is not worth its smaller attention
calls: such rows are trained one a line. Set by measurement (`benchmarks.tree_training`)."""

NODE_BITS = OFFSET_BITS = 17
"""Nodes of a tree with their probes, and tokens of a turn (`common.nouns`), each below 2^17."""
TREE_BITS = 63 - NODE_BITS - OFFSET_BITS


@dataclass(frozen=True, slots=True)
class Packed:
    """Some branches of one tree as one sequence, or several such end to end."""

    branches: tuple[int, ...]
    """`[B]` places of the rows in the list they were taken from."""
    ids: Ints
    """`[T]`"""
    positions: Ints
    """`[T]` place of each token in its branch."""
    ends: Ints
    """`[T]` place after the last token that may look at this one (`learner.layout`)."""
    sources: Ints
    """`[N]` where the hidden state stands that predicts each trained token: the token before it."""
    targets: Ints
    """`[N]` ids of the trained tokens."""
    behaviour: Floats
    """`[N]` log-probabilities at sampling."""
    lags: Ints
    """`[N]`"""
    keys: Ints
    """`[N]` `token_keys` of the trained tokens."""
    pair_tokens: Ints
    """`[M]` index into the N trained tokens."""
    pair_branches: Ints
    """`[M]` index into the B branches."""
    pair_turns: Ints
    """`[M]` which turn of which branch, 0 to the number of those with trained tokens − 1. For losses of whole
    turns (`learner.streams`)."""
    pair_advantages: Floats
    """`[M]`"""
    pair_weights: Floats
    """`[M]`"""

    @property
    def length(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of one tree that go through the model together."""

    places: tuple[int, ...]
    paths: tuple[Path, ...]
    layout: Layout

    @property
    def sharing(self) -> float:
        """Tokens of the rows for each token computed: 1 where nothing is shared."""
        return sum(path.length for path in self.paths) / max(1, self.layout.length)


def groups(rows: Sequence[Row], chosen: Sequence[int], max_tokens: int) -> list[Group]:
    """The chosen rows by tree, in the order the trees come in, each cut to at most `max_tokens`."""
    trees: dict[int, list[int]] = {}
    for place in chosen:
        trees.setdefault(rows[place].tree, []).append(place)
    found = []
    for places in trees.values():
        paths = [path_of(rows[place]) for place in places]
        for part in split(paths, max_tokens):
            kept = tuple(paths[index] for index in part)
            found.append(Group(tuple(places[index] for index in part), kept, lay_out(kept)))
    return found


def pack_group(rows: Sequence[Row], group: Group) -> Packed:
    """Merge the rows of a group.

    Raises:
        ValueError: they are of several trees, or train a token that nothing comes before.
    """
    if len({rows[place].tree for place in group.places}) > 1:
        raise ValueError("rows of several trees cannot share one packed sequence")
    length = group.layout.length
    ids, positions = np.zeros(length, np.int64), np.zeros(length, np.int64)
    trained: list[_Trained] = []
    for branch, (place, path) in enumerate(zip(group.places, group.paths, strict=True)):
        row, at = rows[place], group.layout.places(path)
        ids[at], positions[at] = row.ids[: len(at)], np.arange(len(at))
        trained.append(_trained(row, at, branch))
    return _merge(group.places, ids, positions, group.layout.ends, trained)


def trained_places(row: Row) -> Ints:
    """Which tokens of a row are trained, ascending.

    Raises:
        ValueError: the first of all is, which no hidden state predicts.
    """
    if row.length and row.trained[0]:
        raise ValueError(f"the first token of a row of tree {row.tree} is trained, but nothing predicts it")
    return np.flatnonzero(row.trained)


def token_keys(row: Row) -> Ints:
    """A number for each token of a row, `[T]`: equal where tree, node and place in the node are.

    Raises:
        ValueError: the tree's number or a node's does not fit.
    """
    starts = np.flatnonzero(np.diff(row.nodes, prepend=-1))
    offsets = np.arange(row.length) - np.repeat(starts, np.diff(starts, append=row.length))
    largest = max(int(row.nodes.max(initial=0)) >> NODE_BITS, int(offsets.max(initial=0)) >> OFFSET_BITS)
    if largest or row.tree >> TREE_BITS:
        raise ValueError(f"tree {row.tree} is too large for the numbers of its tokens to be told apart")
    keys: Ints = (row.tree << NODE_BITS | row.nodes) << OFFSET_BITS | offsets
    return keys


def tree_of_key(key: int) -> int:
    """The tree of a token's number."""
    return key >> (NODE_BITS + OFFSET_BITS)


def node_of_key(key: int) -> int:
    """The node of a token's number."""
    return key >> OFFSET_BITS & ((1 << NODE_BITS) - 1)


@dataclass(frozen=True, slots=True)
class _Trained:
    """The trained tokens of one branch, one entry each."""

    keys: Ints
    sources: Ints
    targets: Ints
    behaviour: Floats
    lags: Ints
    branches: Ints
    nodes: Ints
    advantages: Floats
    weights: Floats


def _trained(row: Row, at: Ints, branch: int) -> _Trained:
    paid = trained_places(row)
    return _Trained(
        token_keys(row)[paid], at[paid - 1], row.ids[paid], row.behaviour[paid], row.lags[paid],
        np.full(len(paid), branch, np.int64), row.nodes[paid], row.advantages[paid], row.weights[paid],
    )  # fmt: skip


def _merge(
    places: tuple[int, ...], ids: Ints, positions: Ints, ends: Ints, trained: Sequence[_Trained]
) -> Packed:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in trained])

    # The tokens of different branches with one key are the same token, sampled once.
    keys, first, pair_tokens = np.unique(joined("keys"), return_index=True, return_inverse=True)
    branches = joined("branches")
    _, pair_turns = np.unique(branches << NODE_BITS | joined("nodes"), return_inverse=True)
    return Packed(
        branches=places, ids=ids, positions=positions, ends=ends,
        sources=joined("sources")[first], targets=joined("targets")[first],
        behaviour=joined("behaviour")[first], lags=joined("lags")[first], keys=keys,
        pair_tokens=pair_tokens.reshape(-1), pair_branches=branches, pair_turns=pair_turns.reshape(-1),
        pair_advantages=joined("advantages"), pair_weights=joined("weights"),
    )  # fmt: skip


def concatenate(parts: Sequence[Packed]) -> Packed:
    """Several packed trees end to end: no token is filling, and by `ends` none sees another's tree."""
    places = np.cumsum([0, *(part.length for part in parts)])
    tokens = np.cumsum([0, *(len(part.targets) for part in parts)])
    branches = np.cumsum([0, *(len(part.branches) for part in parts)])
    turns = np.cumsum([0, *(int(part.pair_turns.max(initial=-1)) + 1 for part in parts)])

    def joined(name: str, moved: np.ndarray | None = None) -> np.ndarray:
        if moved is None:
            return np.concatenate([getattr(part, name) for part in parts])
        return np.concatenate(
            [getattr(part, name) + by for part, by in zip(parts, moved.tolist(), strict=False)]
        )

    return Packed(
        branches=tuple(place for part in parts for place in part.branches),
        ids=joined("ids"), positions=joined("positions"), ends=joined("ends", places),
        sources=joined("sources", places), targets=joined("targets"),
        behaviour=joined("behaviour"), lags=joined("lags"), keys=joined("keys"),
        pair_tokens=joined("pair_tokens", tokens), pair_branches=joined("pair_branches", branches),
        pair_turns=joined("pair_turns", turns),
        pair_advantages=joined("pair_advantages"), pair_weights=joined("pair_weights"),
    )  # fmt: skip


def pack_line(rows: Sequence[Row], chosen: Sequence[Group]) -> Packed:
    """Several groups as one line."""
    return concatenate([pack_group(rows, group) for group in chosen])
