"""What ranks say to each other: one class a message, MessagePack on the wire, and nothing that runs when it is read.

A frame is an array: the number of its class, then its fields. Two things inside are bytes that the exchange does not
look into: a user's extras, and what the leader announces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, get_args

import msgspec

from graftlab.base.tags import Plain, TapKey
from graftlab.base.wire import integer_from_bytes, integer_to_bytes, text_from_bytes, text_to_bytes
from graftlab.exchange.status_page import WireStatus


class DeviceLocation(NamedTuple):
    """Where in a sender's GPU memory a tensor lies, and the event behind its copy: a number, and what opens it."""

    chunk: int
    offset: int
    event: int
    opens_event: bytes


Location = int | DeviceLocation | None
"""Where a published tensor lies: an offset in its sender's segment, a spot on a GPU, or nowhere if it has no bytes."""


class Frame(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """What all frames have in common."""


class PublishFrame(Frame, frozen=True, tag=0):
    """A tensor lies ready. ``dtype`` is its name in torch, ``extras`` is pickled by the user's own rank."""

    key: TapKey
    id: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    location: Location
    extras: bytes | None


class DeclineFrame(Frame, frozen=True, tag=1):
    """Nothing comes under this key. To a rank that has ended the step: such a tap exists here."""

    key: TapKey


class ReleaseFrame(Frame, frozen=True, tag=2):
    """The receiver has done with the tensors of these ids."""

    ids: list[int]


class StepEndFrame(Frame, frozen=True, tag=3):
    """The sender of this neither publishes for the step nor asks for anything of it any more."""

    step: int


class RunEndFrame(Frame, frozen=True, tag=4):
    """The same of the whole run."""


class AnnouncementFrame(Frame, frozen=True, tag=5):
    """What the leader says of a step, in its own encoding."""

    step: int
    message: bytes


class ChunkFrame(Frame, frozen=True, tag=6):
    """How to open a piece of the sender's GPU memory.

    torch unpickles the handle. So this frame is only for peers that were launched together with this rank, on its host.
    """

    chunk: int
    handle: bytes


class ChunkReplyFrame(Frame, frozen=True, tag=7):
    """Whether the chunk can be read here; if not, why."""

    failure: str | None


class YieldQueryFrame(Frame, frozen=True, tag=8):
    """My wait of this number is for you, who seem to wait for me: must I give it up?

    ``is_known`` says whether you have ever reached such a tap.
    """

    wait: int
    is_known: bool


class YieldFrame(Frame, frozen=True, tag=9):
    """Yes, give up the wait of this number."""

    wait: int


class StatusFrame(Frame, frozen=True, tag=11):
    """Where the sender is, for ranks that cannot look into its memory.

    ``received`` is how many tensors of the receiver of this had come by then.
    """

    status: WireStatus
    received: int


class _EscapedFrame(Frame, frozen=True, tag=10):
    """A frame whose key MessagePack cannot hold: the key in another form, and the frame with an empty one."""

    key: _EscapedKey
    frame: bytes


class _EscapedKey(NamedTuple):
    """A :class:`TapKey` with all text as UTF-8 that may hold half a surrogate pair; values as :func:`_escape` says."""

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
"""Every class of frames that :func:`decode` returns."""

_NO_KEY = TapKey(0, "", (), "", 0)
_TEXT, _INTEGER = b"t", b"i"

_encode: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(_Any).decode
_decode_keyed: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(_Keyed).decode


def encode(frame: Frame) -> bytes:
    """The frame as it travels."""
    try:
        return _encode(frame)
    except (OverflowError, UnicodeEncodeError):
        # An integer of more than 64 bits, or text that is no Unicode: a tag may well be either.
        if not isinstance(frame, _Keyed):
            raise
        return _encode(_EscapedFrame(_escape_key(frame.key), _encode(msgspec.structs.replace(frame, key=_NO_KEY))))


def decode(data: bytes) -> Frame:
    """The inverse of :func:`encode`. Raises ValueError for bytes that are no frame."""
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
    """Text and integers as bytes that begin with a letter for which it is; anything else as it is."""
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
    raise ValueError(f"a tag's value of the kind {kind!r}")
