"""What types cannot say about a message: arrays that belong together, trees that are trees.

`common.codec` runs these on every message, sent or received, after types and bounds have been checked. Each
raises `ProtocolError` with the place and the values, for the receiver to count and the sender to mend.
"""

from __future__ import annotations

import numpy as np

from common.errors import ProtocolError
from common.messages import Expanded, Grant, Inspected, Message, TreeReady
from common.nouns import NO_PARENT, ROOT, Continuation, Node, Tree, Turn, floats, ids

ITEM_BYTES = 4
"""Token ids are int32, log-probabilities and features float32."""
MAX_LOGPROB = 1e-4
"""Rounding of a log-softmax may lift a log-probability this far above 0."""


def check_message(message: Message) -> None:
    """Raise `ProtocolError` if the arrays or the tree inside `message` contradict themselves."""
    match message:
        case Expanded(turn=turn):
            check_turn(turn, f"{message.lease} turn {message.offset}")
        case Inspected(root=root):
            check_turn(root, f"root of tree={message.tree}")
            _require(not root.action, f"root of tree={message.tree}", "must not hold an action")
        case Grant(leases=leases):
            for lease in leases:
                check_ids(lease.prefix, f"{lease.id}")
        case TreeReady(tree=tree):
            check_tree(tree)
        case _:
            pass


def check_turn(turn: Turn, where: str) -> None:
    """Lengths that must agree, ids that must be ids, log-probabilities that must be some.

    A demonstration was not sampled: it may leave out log-probabilities and versions.
    """
    _check_lengths(turn, where)
    if not _sound([turn]):
        _name_unsound(turn, where)


def check_tree(tree: Tree) -> None:
    """Node `i` stands at place `i` and below an earlier node, so that every walk reaches the root."""
    for place, node in enumerate(tree.nodes):
        _check_place(tree, node, place)
        _check_lengths(node.turn, f"tree={tree.id}/node={place}")
    for continuation in tree.continuations:
        _check_continuation(tree, continuation)
    if not _sound([node.turn for node in tree.nodes]):
        for place, node in enumerate(tree.nodes):
            _name_unsound(node.turn, f"tree={tree.id}/node={place}")


def _check_lengths(turn: Turn, where: str) -> None:
    tokens = _items(turn.action, where, "action")
    _items(turn.observation, where, "observation")
    logprobs = _items(turn.logprobs, where, "logprobs")
    entropies = _items(turn.entropies, where, "entropies")
    _items(turn.features or b"", where, "features")
    for probe in turn.probes:
        _items(probe.context, where, f"context of probe {probe.name}")
        _items(probe.targets, where, f"targets of probe {probe.name}")
    sampled = sum(run.count for run in turn.versions)
    optional = 0 if turn.demonstration else tokens
    _require(logprobs in (tokens, optional), where, f"has {tokens} action tokens but {logprobs} logprobs")
    _require(entropies in (tokens, 0), where, f"has {tokens} action tokens but {entropies} entropies")
    _require(sampled in (tokens, optional), where, f"has {tokens} action tokens but versions for {sampled}")


def _token_arrays(turn: Turn) -> list[bytes]:
    found = [turn.action, turn.observation]
    for probe in turn.probes:
        found += (probe.context, probe.targets)
    return found


def _sound(turns: list[Turn]) -> bool:
    """Whether all values of all turns are valid: three passes over one array, since most turns are short."""
    tokens = ids(b"".join(array for turn in turns for array in _token_arrays(turn)))
    logprobs = floats(b"".join(turn.logprobs for turn in turns))
    others = floats(b"".join(part for turn in turns for part in (turn.entropies, turn.features or b"")))
    return bool(
        (tokens >= 0).all()
        and np.isfinite(logprobs).all()
        and (logprobs <= MAX_LOGPROB).all()
        and np.isfinite(others).all()
    )


def _name_unsound(turn: Turn, where: str) -> None:
    """Raise for the first array of `turn` that has an invalid value."""
    for array in _token_arrays(turn):
        check_ids(array, where)
    for name in ("logprobs", "entropies", "features"):
        values = floats(getattr(turn, name) or b"")
        _require(bool(np.isfinite(values).all()), where, f"has {name} that are not finite")
    positive = floats(turn.logprobs) > MAX_LOGPROB
    _require(not positive.any(), where, "has a log-probability above 0")


def check_ids(data: bytes, where: str) -> None:
    """All token ids in `data` are 0 or more."""
    _items(data, where, "token ids")
    tokens = ids(data)
    _require(bool((tokens >= 0).all()), where, f"has a negative token id: {tokens.min(initial=0)}")


def _check_place(tree: Tree, node: Node, place: int) -> None:
    where = f"tree={tree.id}/node={place}"
    _require(node.index == place, where, f"says that its index is {node.index}")
    if place == ROOT:
        _require(node.parent == NO_PARENT, where, f"is the root but has the parent {node.parent}")
    else:
        _require(0 <= node.parent < place, where, f"has the parent {node.parent}, which is not before it")


def _check_continuation(tree: Tree, continuation: Continuation) -> None:
    where = f"tree={tree.id}/lease={continuation.number}"
    size = len(tree.nodes)
    _require(continuation.anchor < size, where, f"starts from node {continuation.anchor} of {size}")
    outside = [index for index in continuation.nodes if index >= size]
    _require(not outside, where, f"lists nodes that the tree of {size} does not have: {outside[:3]}")


def _items(data: bytes, where: str, what: str) -> int:
    count, rest = divmod(len(data), ITEM_BYTES)
    if rest:
        raise ProtocolError(f"{where} has {what} of {len(data)} bytes, which is no multiple of {ITEM_BYTES}")
    return count


def _require(ok: bool, where: str, what: str) -> None:
    if not ok:
        raise ProtocolError(f"{where} {what}")
