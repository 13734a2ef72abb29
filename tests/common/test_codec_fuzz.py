"""Whatever arrives, the codec gives a valid message or a ProtocolError, and takes little memory for it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from common import messages as m
from common.codec import PREFIX, decode, encode
from common.errors import ProtocolError
from common.messages import Message
from tests.common.frames import plain, union_of, with_payload
from tests.common.message_samples import SAMPLES, frames_of


def survives(frames: list[bytes], union: Any) -> None:
    """Either a message that can be sent on unchanged, or ProtocolError; anything else escapes and fails."""
    try:
        envelope = decode(frames, union)
    except ProtocolError:
        return
    assert isinstance(envelope.message, union)
    if not isinstance(envelope.message, m.Metrics):  # a NaN is not equal to itself
        assert decode(encode(envelope.message, run="", sender="x"), union).message == envelope.message


@given(st.lists(st.binary(max_size=64), max_size=5))
def test_random_frames_never_raise_anything_but_a_protocol_error(frames: list[bytes]) -> None:
    survives(frames, m.ToAllocator)


@given(st.sampled_from(SAMPLES), st.binary(max_size=200), st.booleans())
def test_random_bytes_behind_a_fitting_header_never_raise_anything_else(
    sample: Message, noise: bytes, as_header: bool
) -> None:
    frames = with_payload(sample, noise)
    survives([PREFIX, noise, frames[2]] if as_header else frames, union_of(sample))


@given(st.data(), st.sampled_from(SAMPLES))
def test_mutated_bytes_of_a_valid_payload_never_raise_anything_else(
    data: st.DataObject, sample: Message
) -> None:
    payload = bytearray(frames_of(sample)[2])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, max(0, len(payload) - 1)))
        match data.draw(st.sampled_from(("flip", "cut", "insert", "truncate"))):
            case "flip" if payload:
                payload[place] = data.draw(st.integers(0, 255))
            case "cut":
                del payload[place : place + data.draw(st.integers(1, 8))]
            case "insert":
                payload[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                del payload[place:]
    survives(with_payload(sample, bytes(payload)), union_of(sample))


ODD_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from(["x" * 20_000, b"y" * 300_000, [0] * 5000, [[[]]], {"": {}}, -1, 0, 1 << 62]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(-(1 << 63), (1 << 64) - 1), max_size=3),
)


@given(st.data(), st.sampled_from(SAMPLES))
def test_a_valid_message_with_one_odd_value_never_raises_anything_else(
    data: st.DataObject, sample: Message
) -> None:
    value = plain(sample)
    places = list(walk(value))
    holder, key = data.draw(st.sampled_from(places))
    holder[key] = data.draw(ODD_VALUES)
    try:
        payload = msgpack.packb(value)
    except (ValueError, OverflowError):  # an odd value that msgpack itself cannot write
        return
    survives(with_payload(sample, payload), union_of(sample))


def walk(value: Any) -> Any:
    """(container, key) of every place inside plain values."""
    keys: Any = (
        value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from walk(value[key])


BOMBS = """
import sys, zlib, msgpack
from common import messages as m
from common.codec import decode, PREFIX
from common.errors import ProtocolError

def peak_mib():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

def frames(payload, name):
    header = dict(type=name, id=bytes(16), run="r", sender="s", len=len(payload), crc32=zlib.crc32(payload))
    return [PREFIX, msgpack.packb(header), payload]

MIB = 1 << 20
bombs = {
    "array32 of 4 G": b"\\xdd\\xff\\xff\\xff\\xff",
    "map32 of 4 G": b"\\xdf\\xff\\xff\\xff\\xff",
    "bin32 of 4 G": b"\\xc6\\xff\\xff\\xff\\xff",
    "str32 of 4 G": b"\\xdb\\xff\\xff\\xff\\xff",
    "nested array16": b"\\xdc\\xff\\xff" * 900,
    "nested array16, 64 KiB": b"\\xdc\\xff\\xff" * 21845,
    "nested map16": (b"\\xde\\x0f\\xff\\xa1a" * 900),
    "deep": b"\\x91" * 2000 + b"\\x00",
    "deep maps": b"\\x81\\xa1a" * 2000 + b"\\x00",
    "a mebibyte of empty arrays": (b"\\xdc\\xff\\xff" + b"\\x90" * 65535) * 16,
    "empty arrays in one": b"\\xdd" + MIB.to_bytes(4, "big") + b"\\x90" * MIB,
    "nests of empty arrays": b"\\xdc\\x00\\x10" + (b"\\xdc\\xff\\xff" + b"\\x90" * 65535) * 16,
    "nests of empty maps": b"\\xdc\\x00\\x10" + (b"\\xdc\\xff\\xff" + b"\\x80" * 65535) * 16,
    "short strings": b"\\xdc\\x00\\x08" + (b"\\xdc\\xff\\xff" + b"\\xa2ab" * 65535) * 8,
}
base = peak_mib()
for name, payload in bombs.items():
    for kind in ("TreeReady", "Metrics"):
        for data in (payload, b"\\x82\\xa4type" + msgpack.packb(kind) + b"\\xa4tree" + payload):
            try:
                decode(frames(data, kind), m.AllocatorToLearner if kind == "TreeReady" else m.ToTracker)
            except ProtocolError:
                pass
            else:
                sys.exit(f"{name} was accepted")
            if peak_mib() - base > 50:
                sys.exit(f"{name} took {peak_mib() - base:.0f} MiB")
"""


def test_no_length_bomb_takes_fifty_mebibytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BOMBS], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
