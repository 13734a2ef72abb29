"""The codec: golden bytes, both ways; what is refused, by the receiver and by the sender."""

from __future__ import annotations

import json
import math
from typing import Any

import msgpack
import msgspec
import pytest

from common import messages as m
from common.codec import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    Envelope,
    MessageTooLarge,
    decode,
    encode,
    new_id,
    new_sender,
)
from common.errors import ProtocolError
from common.messages import Message
from tests.common.frames import plain, unchecked, union_of, with_payload
from tests.common.message_samples import (
    GOLDEN_FILE,
    GRANTED,
    LEASE_ID,
    MSG_ID,
    RUN,
    SAMPLES,
    SENDER,
    TREE,
    frames_of,
    name_of,
)

GOLDEN: dict[str, list[str]] = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=name_of)


# ------------------------------------------------------------------------------------------- golden


@every_sample
def test_a_message_encodes_to_its_golden_frames(sample: Message) -> None:
    assert [frame.hex() for frame in frames_of(sample)] == GOLDEN[name_of(sample)]


@every_sample
def test_golden_frames_decode_to_their_message(sample: Message) -> None:
    frames = [bytes.fromhex(frame) for frame in GOLDEN[name_of(sample)]]
    assert decode(frames, union_of(sample)) == Envelope(sample, MSG_ID, RUN, SENDER)


def test_every_message_type_has_a_golden_sample_and_no_other() -> None:
    types = {kind.__name__ for kind in Message.__subclasses__()}
    assert types == set(GOLDEN) == {name_of(sample) for sample in SAMPLES}


def test_the_samples_fill_every_field_of_every_struct_with_something_else_than_its_default() -> None:
    filled: dict[type, set[str]] = {}
    for sample in SAMPLES:
        collect_filled(sample, filled)
    for kind, names in filled.items():
        assert names == set(kind.__struct_fields__), kind  # type: ignore[attr-defined]


def collect_filled(value: Any, filled: dict[type, set[str]]) -> None:
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            inner = getattr(value, field.name)
            default = (
                field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
            )
            if inner is not None and inner != default:
                filled.setdefault(type(value), set()).add(field.name)
            collect_filled(inner, filled)
    elif isinstance(value, list):
        for item in value:
            collect_filled(item, filled)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("count", [0, 1, 2, 4, 2001])
def test_any_number_of_frames_but_three_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"3 frames, got {count}"):
        decode([b"x"] * count, m.ToAllocator)


def test_another_protocol_version_is_named_with_the_remedy() -> None:
    frames = frames_of(SAMPLES[0])
    with pytest.raises(ProtocolError, match="protocol 2, this process speaks 1: run the same release"):
        decode([b"TW\x00\x02", *frames[1:]], m.ToAllocator)


def test_a_port_scan_is_not_taken_for_a_message() -> None:
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        decode([b"GET / HTTP/1.1\r\n", b"", b""], m.ToAllocator)


def test_a_damaged_payload_is_noticed_by_its_checksum() -> None:
    prefix, header, payload = frames_of(SAMPLES[0])
    for place in range(len(payload)):
        damaged = bytearray(payload)
        damaged[place] ^= 1
        with pytest.raises(ProtocolError, match="damaged"):
            decode([prefix, header, bytes(damaged)], m.ToAllocator)


def test_a_message_of_another_direction_is_refused() -> None:
    grant = m.Grant(leases=[GRANTED], version=GRANTED.min_version)
    with pytest.raises(ProtocolError, match="Grant"):
        decode(frames_of(grant), m.ToAllocator)


def test_a_header_that_names_another_type_than_the_payload_is_refused() -> None:
    header = msgpack.unpackb(frames_of(m.Credit(total=1))[1])
    header["type"] = "Bye"
    frames = [PREFIX, msgpack.packb(header), frames_of(m.Credit(total=1))[2]]
    with pytest.raises(ProtocolError, match="the header says Bye, the payload is Credit"):
        decode(frames, m.ToAllocator)


@every_sample
def test_an_unknown_field_or_a_missing_one_is_refused(sample: Message) -> None:
    value = plain(sample)
    with pytest.raises(ProtocolError, match="unknown field"):
        decode(with_payload(sample, msgpack.packb({**value, "extra": 1})), union_of(sample))
    for name in msgspec.structs.fields(type(sample)):
        if name.required:
            rest = {key: inner for key, inner in value.items() if key != name.name}
            with pytest.raises(ProtocolError, match="missing required field"):
                decode(with_payload(sample, msgpack.packb(rest)), union_of(sample))


def test_a_repeated_key_is_refused_not_silently_overwritten() -> None:
    once = msgpack.packb({"type": "Credit", "total": 1})
    twice = b"\x83" + once[1:] + msgpack.packb("total") + msgpack.packb(9)
    with pytest.raises(ProtocolError, match="repeats a key"):
        decode(with_payload(m.Credit(total=1), twice), m.ToAllocator)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_on_both_sides(value: float) -> None:
    outcome = msgspec.structs.replace(TREE.continuations[0].outcome, reward=value)
    finished = m.Finished(lease=LEASE_ID, turns=1, outcome=outcome)
    with pytest.raises(ProtocolError, match=r"cannot send Finished: reward is .* not finite"):
        frames_of(finished)
    with pytest.raises(ProtocolError, match="not finite"):
        decode(unchecked(finished), m.ToAllocator)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_welcome_whose_heartbeats_would_never_rest_is_refused(seconds: float) -> None:
    found = next(sample for sample in SAMPLES if isinstance(sample, m.Welcome))
    for name in ("heartbeat_s", "dead_after_s"):
        with pytest.raises(ProtocolError, match=name):
            decode(unchecked(msgspec.structs.replace(found, **{name: seconds})), m.AllocatorToActor)


def test_metrics_may_hold_numbers_that_are_not_finite_since_the_tracker_counts_them() -> None:
    metrics = m.Metrics(role="learner", peer="l", step=1, values={"loss": math.inf})
    assert decode(frames_of(metrics), m.ToTracker).message == metrics


def test_claiming_to_be_metrics_does_not_let_a_nan_into_another_message() -> None:
    metrics = m.Metrics(role="learner", peer="l", step=1, values={"loss": 1.0})
    finished = plain(SAMPLES[[name_of(s) for s in SAMPLES].index("Finished")])
    finished["outcome"]["reward"] = math.nan
    with pytest.raises(ProtocolError):
        decode(with_payload(metrics, msgpack.packb(finished)), m.ToAllocator)


def test_text_where_bytes_belong_is_not_taken_for_base64() -> None:
    value = {"type": "Received", "ids": ["AAAAAAAAAAAAAAAAAAAAAA=="]}
    with pytest.raises(ProtocolError, match="Expected `bytes`"):
        decode(with_payload(m.Received(ids=[]), msgpack.packb(value)), m.ToAllocator)


# ----------------------------------------------------------------------------------------- the sender


def test_a_message_over_the_limit_is_refused_by_its_sender_with_size_and_limit() -> None:
    big = msgspec.structs.replace(GRANTED, prefix=b"\x00" * (4 << 20))
    with pytest.raises(MessageTooLarge, match=str(MAX_PAYLOAD_BYTES)):
        frames_of(m.Grant(leases=[big] * 16, version=GRANTED.min_version))


def test_a_reason_longer_than_its_bound_is_refused_by_its_sender_not_by_every_receiver() -> None:
    with pytest.raises(ProtocolError, match="cannot send Dropped"):
        frames_of(m.Dropped(tree=1, reason="x" * 5000))


def test_a_header_over_the_limit_is_refused_by_its_sender() -> None:
    with pytest.raises(MessageTooLarge, match=str(MAX_HEADER_BYTES)):
        encode(m.Credit(total=1), run="r" * 5000, sender=SENDER)


def test_ids_and_senders_are_fresh_each_time() -> None:
    assert len({new_id() for _ in range(100)}) == 100
    assert len({new_sender("actor") for _ in range(100)}) == 100
    first = decode(encode(m.Credit(total=1), run=RUN, sender=SENDER), m.ToAllocator)
    again = decode(encode(m.Credit(total=1), run=RUN, sender=SENDER), m.ToAllocator)
    assert first.id != again.id
