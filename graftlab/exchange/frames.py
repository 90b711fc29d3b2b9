"""The frames that ranks send each other: one class each, encoded as MessagePack, so that decoding runs no code.

A frame is an array: the number of its class, then its fields. Two fields are bytes that the exchange does not decode:
a user's extras, and the leader's announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import msgspec

from graftlab.base.tags import Plain, TapKey
from graftlab.base.wire import integer_from_bytes, integer_to_bytes, text_from_bytes, text_to_bytes
from graftlab.exchange.channel import Received
from graftlab.exchange.status_page import WireStatus


class DeviceLocation(NamedTuple):
    """A tensor's place in its sender's GPU memory, and the number and IPC handle of the event after its copy."""

    chunk: int
    offset: int
    event: int
    opens_event: bytes


Location = int | DeviceLocation | None
"""A tensor's place: an offset in its sender's segment, a number of pinned memory, a place on a GPU; None if empty."""


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """The base of all frames."""


class PublishFrame(Frame, frozen=True, tag=0):
    """A tensor is ready. ``dtype`` is its name in torch; ``extras`` is a pickle made by the sending rank."""

    key: TapKey
    id: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    location: Location
    extras: bytes | None


class DeclineFrame(Frame, frozen=True, tag=1):
    """The sender publishes nothing under this key. A receiver that has ended the step learns that the tap exists."""

    key: TapKey


class ReleaseFrame(Frame, frozen=True, tag=2):
    """The receiver no longer uses the tensors with these ids."""

    ids: list[int]


class StepEndFrame(Frame, frozen=True, tag=3):
    """The sender neither publishes nor receives anything more of this step."""

    step: int


class RunEndFrame(Frame, frozen=True, tag=4):
    """The sender neither publishes nor receives anything more of this run."""


class AnnouncementFrame(Frame, frozen=True, tag=5):
    """The leader's message about a step, in the leader's encoding."""

    step: int
    message: bytes


class ChunkFrame(Frame, frozen=True, tag=6):
    """The IPC handle of a chunk of the sender's GPU memory.

    torch unpickles the handle, so this frame is accepted only from peers that share memory with this rank.
    """

    chunk: int
    handle: bytes


class ChunkReplyFrame(Frame, frozen=True, tag=7):
    """Whether the receiver can read the chunk; ``failure`` has the reason if not."""

    failure: str | None


class YieldQueryFrame(Frame, frozen=True, tag=8):
    """The sender and the receiver seem to wait for each other: must the sender end its wait of this number?

    ``is_known`` is whether the receiver's side has ever reported such a tap to the sender.
    """

    wait: int
    is_known: bool


class YieldFrame(Frame, frozen=True, tag=9):
    """The answer to a :class:`YieldQueryFrame`: end the wait of this number."""

    wait: int


class StatusFrame(Frame, frozen=True, tag=11):
    """The sender's status, for ranks that cannot read its memory.

    ``received`` is the number of tensors that the sender had received from this peer by then.
    """

    status: WireStatus
    received: int


class _EscapedFrame(Frame, frozen=True, tag=10):
    """A frame whose key MessagePack cannot encode: the key in an escaped form, and the frame with an empty key."""

    key: _EscapedKey
    frame: bytes


class _EscapedKey(NamedTuple):
    """A :class:`TapKey` with text as UTF-8 that allows lone surrogates, and values encoded by :func:`_escape`."""

    step: int
    name: bytes
    tags: tuple[tuple[bytes, bytes | float | bool | None], ...]
    recompute_status: str
    occurrence: int


_Keyed = PublishFrame | DeclineFrame
_Any = (
    PublishFrame
    | DeclineFrame
    | ReleaseFrame
    | StepEndFrame
    | RunEndFrame
    | AnnouncementFrame
    | ChunkFrame
    | ChunkReplyFrame
    | YieldQueryFrame
    | YieldFrame
    | StatusFrame
    | _EscapedFrame
)

KINDS = tuple(kind for kind in get_args(_Any) if kind is not _EscapedFrame)
"""Every class that :func:`decode` returns."""

_NO_KEY = TapKey(0, "", (), "", 0)
_TEXT, _INTEGER = b"t", b"i"

_encode: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[Received], Frame] = msgspec.msgpack.Decoder(_Any).decode
_decode_keyed: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(_Keyed).decode


def encode(frame: Frame) -> bytes:
    try:
        return _encode(frame)
    except (OverflowError, UnicodeEncodeError):
        # A tag may be an integer of more than 64 bits, or text with a lone surrogate.
        if not isinstance(frame, _Keyed):
            raise
        return _encode(_EscapedFrame(_escape_key(frame.key), _encode(msgspec.structs.replace(frame, key=_NO_KEY))))


def decode(data: Received) -> Frame:
    """Decode a frame. Raises ValueError for bytes that are not one."""
    try:
        frame = _decode(data)
        if type(frame) is _EscapedFrame:
            frame = msgspec.structs.replace(_decode_keyed(frame.frame), key=_restore_key(frame.key))
        return frame
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def _escape_key(key: TapKey) -> _EscapedKey:
    tags = tuple((text_to_bytes(name), _escape(value)) for name, value in key.tags)
    return _EscapedKey(key.step, text_to_bytes(key.name), tags, key.recompute_status, key.occurrence)


def _restore_key(key: _EscapedKey) -> TapKey:
    tags = tuple((text_from_bytes(name), _restore(value)) for name, value in key.tags)
    return TapKey(key.step, text_from_bytes(key.name), tags, key.recompute_status, key.occurrence)


def _escape(value: Plain) -> bytes | float | bool | None:
    """Encode text and integers as bytes that begin with a letter for the kind; return other values unchanged."""
    if isinstance(value, str):
        return _TEXT + text_to_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _INTEGER + integer_to_bytes(value)
    return value


def _restore(value: bytes | float | bool | None) -> Plain:
    if not isinstance(value, bytes):
        return value
    kind, body = value[:1], value[1:]
    if kind == _TEXT:
        return text_from_bytes(body)
    if kind == _INTEGER:
        return integer_from_bytes(body)
    raise ValueError(f"a tag's value of unknown kind {kind!r}")
