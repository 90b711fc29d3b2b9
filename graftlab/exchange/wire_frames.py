"""What the wire threads of two ranks say to each other, MessagePack on the wire.

Of two ranks the one with the lower world rank leads: it makes the id, and says which transfer is next.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class WireFrame(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """What all of them have in common."""


class UniqueId(WireFrame, frozen=True, tag=0):
    """The leader: this is what our communicator is found by."""

    id: bytes


class Ready(WireFrame, frozen=True, tag=1):
    """My end of the communicator is there."""


class Failed(WireFrame, frozen=True, tag=2):
    """I have given our communicator up."""

    why: str


class Fetch(WireFrame, frozen=True, tag=3):
    """The receiver: I want the tensor of this number, which has so many bytes."""

    number: int
    nbytes: int


class NotThere(WireFrame, frozen=True, tag=4):
    """The sender: I have no such tensor, or not any more."""

    number: int


class There(WireFrame, frozen=True, tag=5):
    """A sender that does not lead: my GPU has come so far that this one can be sent at once."""

    number: int


class Go(WireFrame, frozen=True, tag=6):
    """The leader: I issue my part of this transfer now, do so too. With ``to_you`` I send, and else you do."""

    number: int
    to_you: bool


_encode = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], WireFrame] = msgspec.msgpack.Decoder(
    UniqueId | Ready | Failed | Fetch | NotThere | There | Go
).decode


def encode(frame: WireFrame) -> bytes:
    """The frame as it travels."""
    return _encode(frame)


def decode(data: bytes) -> WireFrame:
    """The inverse. Raises ValueError for bytes that are no such frame."""
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
