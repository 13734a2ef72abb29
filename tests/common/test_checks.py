"""Messages that contradict themselves are refused, on both sides and wherever they travel."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pytest

from common import messages as m
from common.codec import decode
from common.errors import ProtocolError
from common.messages import Message
from common.nouns import floats_to_bytes
from tests.common.frames import unchecked
from tests.common.message_samples import LEASE_ID, TREE, TURN, frames_of


def assert_refused_on_both_sides(message: Message, union: Any, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        frames_of(message)
    with pytest.raises(ProtocolError, match=what):
        decode(unchecked(message), union)


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"logprobs": TURN.logprobs[:-4]}, "3 action tokens but 2 logprobs"),
        ({"entropies": TURN.entropies[:-4]}, "3 action tokens but 2 entropies"),
        ({"versions": TURN.versions[:1]}, "3 action tokens but versions for 2"),
        ({"action": TURN.action[:-1]}, "action of 11 bytes, which is no multiple of 4"),
        ({"observation": b"abc"}, "observation of 3 bytes"),
        ({"observation": struct.pack("<i", -1)}, "negative token id: -1"),
        ({"logprobs": floats_to_bytes([0.1, -1.0, -1.0])}, "log-probability above 0"),
        ({"logprobs": floats_to_bytes([-math.inf, -1.0, -1.0])}, "not finite"),
        ({"features": floats_to_bytes([math.nan])}, "features that are not finite"),
        ({"features": b"abcde"}, "features of 5 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_turn_whose_arrays_contradict_each_other_is_refused_wherever_it_travels(
    changes: dict[str, Any], what: str
) -> None:
    turn = msgspec.structs.replace(TURN, demonstration=False, **changes)
    expanded = m.Expanded(lease=LEASE_ID, offset=0, turn=turn)
    nodes = [TREE.nodes[0], msgspec.structs.replace(TREE.nodes[1], turn=turn)]
    ready = m.TreeReady(tree=msgspec.structs.replace(TREE, nodes=nodes))
    for message, union in ((expanded, m.ToAllocator), (ready, m.AllocatorToLearner)):
        assert_refused_on_both_sides(message, union, what)


def test_a_demonstration_may_leave_out_what_was_never_sampled() -> None:
    turn = msgspec.structs.replace(TURN, demonstration=True, logprobs=b"", entropies=b"", versions=[])
    expanded = m.Expanded(lease=LEASE_ID, offset=0, turn=turn)
    assert decode(frames_of(expanded), m.ToAllocator).message == expanded
    sampled = msgspec.structs.replace(expanded, turn=msgspec.structs.replace(turn, demonstration=False))
    with pytest.raises(ProtocolError, match="3 action tokens but 0 logprobs"):
        frames_of(sampled)


@pytest.mark.parametrize(
    "parent, index, what",
    [(1, 1, "not before it"), (7, 1, "not before it"), (-1, 1, "not before it"), (0, 2, "its index is 2")],
)
def test_a_tree_in_which_a_walk_would_not_reach_the_root_is_refused(
    parent: int, index: int, what: str
) -> None:
    node = msgspec.structs.replace(TREE.nodes[1], parent=parent, index=index)
    ready = m.TreeReady(tree=msgspec.structs.replace(TREE, nodes=[TREE.nodes[0], node]))
    assert_refused_on_both_sides(ready, m.AllocatorToLearner, what)


@pytest.mark.parametrize("changes", [{"anchor": 2}, {"nodes": [1, 2]}])
def test_a_continuation_that_points_outside_its_tree_is_refused(changes: dict[str, Any]) -> None:
    continuation = msgspec.structs.replace(TREE.continuations[0], **changes)
    ready = m.TreeReady(tree=msgspec.structs.replace(TREE, continuations=[continuation]))
    assert_refused_on_both_sides(ready, m.AllocatorToLearner, "tree=5/lease=3")
