"""Messages to frames and back: the one place where bytes become values.

    frame 0   magic + version   `TW\\0\\1`
    frame 1   header            msgpack map, at most 4 KiB: type, id, run, sender, len, crc32 of frame 2
    frame 2   payload           msgpack map of the message, at most 64 MiB

A ROUTER puts its routing id in front; strip it before `decode`. Whatever arrives, `decode` returns a valid
message or raises `ProtocolError`, and memory stays within a small multiple of the bytes received. `encode`
opens what it has packed by the same rules, so that no sender repeats for ever what every receiver refuses.
Rules and the measurements behind them: msgpack advisory GHSA-6v7p-g79w-8964 (nested array headers), and
`docs/architecture.md`.
"""

from __future__ import annotations

import math
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from common.checks import check_message
from common.errors import OtherProtocol, ProtocolError
from common.messages import MAX_BATCH, PROTOCOL_VERSION, Message, MessageId, Metrics
from common.nouns import MAX_CONTEXT_TOKENS, MAX_NODES, MAX_SNAPSHOT_BYTES, MAX_TEXT, Count, Name, Struct

MAGIC = b"TW\x00"
PREFIX = MAGIC + bytes([PROTOCOL_VERSION])
NUM_FRAMES = 3
MAX_HEADER_BYTES = 4 << 10
MAX_PAYLOAD_BYTES = 64 << 20
"""Far above any chat tree; a larger one is refused by its sender, not cut off by the socket."""
MAX_BIN_BYTES = max(4 * MAX_CONTEXT_TOKENS, MAX_SNAPSHOT_BYTES)
BYTES_PER_ITEM = 4
"""Messages spend more than 8 bytes on a value with its name; a payload of tiny values is an attack."""
FREE_ITEMS = 1 << 16
"""Lists of small integers may be denser than `BYTES_PER_ITEM`, but none is longer than this."""


class MessageTooLarge(ProtocolError):
    """The sender's own check: the message would exceed a frame's limit."""


class Header(Struct, frozen=True):
    """Second frame. `sender` is `<name>/<incarnation>`, unique for each start of a process."""

    type: Name
    id: MessageId
    run: Annotated[str, Meta(max_length=128)]
    sender: Annotated[str, Meta(min_length=1, max_length=300)]
    len: Count
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A decoded message with what its header says about it."""

    message: Any
    """A member of the union that was asked for."""
    id: bytes
    run: str
    """Run id of the sender; empty until it has been welcomed."""
    sender: str


def new_id() -> bytes:
    """A fresh message id, 16 random bytes."""
    return uuid.uuid4().bytes


def new_sender(name: str) -> str:
    """`<name>/<incarnation>` with a random incarnation: make one for each start of a process."""
    return f"{name}/{uuid.uuid4().hex[:12]}"


def encode(message: Message, *, run: str, sender: str, msg_id: bytes | None = None) -> list[bytes]:
    """The three frames of `message`.

    Raises:
        MessageTooLarge: header or payload exceed their limits.
        ProtocolError: a receiver would refuse the message (bounds, non-finite numbers, arrays that disagree).
    """
    name = type(message).__name__
    try:
        payload = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"cannot send {name}: {error}") from error
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageTooLarge(
            f"{name} has {len(payload)} bytes, the limit of a message is {MAX_PAYLOAD_BYTES}"
        )
    try:
        _open_payload(payload, type(message), name)
    except ProtocolError as error:
        raise ProtocolError(f"cannot send {name}: {error}") from error
    header = {
        "type": name,
        "id": new_id() if msg_id is None else msg_id,
        "run": run,
        "sender": sender,
        "len": len(payload),
        "crc32": zlib.crc32(payload),
    }
    packed = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise MessageTooLarge(
            f"the header of {name} has {len(packed)} bytes, the limit is {MAX_HEADER_BYTES}"
        )
    return [PREFIX, packed, payload]


def decode(frames: Sequence[bytes], union: Any) -> Envelope:
    """The message in `frames` as a member of `union` (one of those at the end of `common.messages`).

    Raises:
        ProtocolError: anything at all is wrong with the frames. The caller counts it and lives on.
    """
    if len(frames) != NUM_FRAMES:
        raise ProtocolError(f"a message has {NUM_FRAMES} frames, got {len(frames)}")
    prefix, packed_header, payload = frames
    _check_prefix(prefix)
    if len(packed_header) > MAX_HEADER_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"frames of {len(packed_header)} and {len(payload)} bytes exceed the limits")
    header: Header = _convert(_unpack(packed_header, finite=True), Header, "header")
    if header.len != len(payload):
        raise ProtocolError(f"{header.type}: the header promises {header.len} bytes, got {len(payload)}")
    if header.crc32 != zlib.crc32(payload):
        raise ProtocolError(f"{header.type}: the checksum does not match, the payload was damaged on its way")
    message = _open_payload(payload, union, header.type)
    if type(message).__name__ != header.type:
        raise ProtocolError(f"the header says {header.type}, the payload is {type(message).__name__}")
    return Envelope(message, header.id, header.run, header.sender)


def _check_prefix(prefix: bytes) -> None:
    if prefix == PREFIX:
        return
    if len(prefix) == len(PREFIX) and prefix.startswith(MAGIC):
        raise OtherProtocol(
            f"the peer speaks protocol {prefix[-1]}, this process speaks {PROTOCOL_VERSION}: "
            "run the same release everywhere"
        )
    raise ProtocolError(f"not a message of this protocol: it begins with {bytes(prefix[:8])!r}")


def _open_payload(payload: bytes, union: Any, name: str) -> Any:
    """Unpack, convert and check. The numbers of `Metrics` may be anything: the tracker sorts them out."""
    message = _convert(_unpack(payload, finite=name != Metrics.__name__), union, name)
    check_message(message)
    return message


def _unpack(data: bytes, *, finite: bool) -> Any:
    """msgpack bytes to plain values.

    msgpack allocates what an array header claims, level by level: 3 KB of nested headers took 68 MiB. msgspec
    first walks the bytes without building anything, which proves that each item claimed is there.
    """
    hooks = _Hooks(len(data), finite)
    try:
        msgspec.msgpack.decode(data, type=msgspec.Raw)
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            list_hook=hooks.on_list,
            object_pairs_hook=hooks.on_map,
            ext_hook=hooks.on_ext,
            max_str_len=4 * MAX_TEXT,
            max_bin_len=MAX_BIN_BYTES,
            max_array_len=MAX_NODES,
            max_map_len=MAX_BATCH,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except Exception as error:  # whatever a peer sends costs that message, not the process
        raise ProtocolError(f"malformed msgpack: {type(error).__name__}: {error}") from error


def _convert(value: Any, expected: Any, what: str) -> Any:
    try:
        return msgspec.convert(value, expected, strict=True, builtin_types=(bytes,))
    except Exception as error:  # whatever a peer sends costs that message, not the process
        raise ProtocolError(f"invalid {what}: {error}") from error


class _Hooks:
    """Called by msgpack for each finished list and map: closed keys, finite numbers, a budget of values."""

    def __init__(self, size: int, finite: bool) -> None:
        self._left = FREE_ITEMS + size // BYTES_PER_ITEM
        self._finite = finite

    def on_list(self, items: list[Any]) -> list[Any]:
        self._spend(len(items))
        return items

    def on_map(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._spend(2 * len(pairs))
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ProtocolError("a map repeats a key")
        if self._finite:
            for key, value in pairs:
                if type(value) is float and not math.isfinite(value):
                    raise ProtocolError(f"{key} is {value}, which is not finite")
        return found

    def on_ext(self, code: int, data: bytes) -> Any:
        raise ProtocolError(f"extension types are not part of the protocol (code {code})")

    def _spend(self, items: int) -> None:
        self._left -= items + 1
        if self._left < 0:
            raise ProtocolError("too many values for so few bytes")
