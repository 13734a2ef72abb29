"""Frames that the codec would not make itself, and the union that a message travels in."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import msgspec

from common import messages as m
from common.codec import PREFIX
from common.messages import Message
from tests.common.message_samples import MSG_ID, RUN, SENDER, name_of

UNIONS = (
    m.ToAllocator,
    m.ActorToAllocator,
    m.LearnerToAllocator,
    m.AllocatorToActor,
    m.AllocatorToLearner,
    m.ToWeights,
    m.FromWeights,
    m.Hint,
    m.ToTracker,
)


def union_of(sample: Message) -> Any:
    """A union of the protocol that has the sample's type."""
    return next(union for union in UNIONS if isinstance(sample, union))


def with_payload(sample: Message, payload: bytes) -> list[bytes]:
    """Frames whose header fits `payload`, so that nothing but the payload can be wrong."""
    who = {"type": name_of(sample), "id": MSG_ID, "run": RUN, "sender": SENDER}
    header = {**who, "len": len(payload), "crc32": zlib.crc32(payload)}
    return [PREFIX, msgpack.packb(header), payload]


def plain(sample: Message) -> Any:
    return msgspec.to_builtins(sample, builtin_types=(bytes,))


def unchecked(sample: Message) -> list[bytes]:
    """Frames of a sender that checks nothing."""
    return with_payload(sample, msgpack.packb(plain(sample)))
