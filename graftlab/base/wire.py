"""msgpack encoding of messages between processes: plain data, type-checked on arrival, and never executed.

Two kinds of values that msgpack lacks travel as extensions, so that a tag's value arrives unchanged: integers of more
than 64 bits, and text with lone surrogates, which UTF-8 cannot express.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from graftlab.errors import MessageError

WIRE_VERSION = 1
"""What two processes must have in common to understand each other: the messages of the handshake, of the ranks and of
the exchange, and the functions that are sent to ranks by their names. A change of any of these is another version.
"""

_INTEGER, _TEXT = 1, 2

_encoder = msgspec.msgpack.Encoder()
_encode = _encoder.encode


def graftlab_release() -> str:
    """Return the release of this copy of graftlab."""
    try:
        return version("graftlab")
    except PackageNotFoundError:
        return "0+unknown"


def encode(value: object) -> bytes:
    """Encode a :class:`msgspec.Struct` or plain data.

    Values in dicts arrive exactly. In text for display (a field of type ``str``, a dict's key) lone surrogates become
    escapes.
    """
    try:
        return _encode(value)
    except (OverflowError, UnicodeEncodeError):
        return _encode(_expressible(value))


def encode_after(head: bytes, value: object) -> bytearray:
    """Encode a value as :func:`encode` does, after some bytes: in one piece of memory, which may be large."""
    encoded = bytearray(head)
    try:
        _encoder.encode_into(value, encoded, len(head))
    except (OverflowError, UnicodeEncodeError):
        encoded[len(head) :] = _encode(_expressible(value))
    return encoded


def integer_to_bytes(value: int) -> bytes:
    """Encode an integer of any length."""
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def integer_from_bytes(data: bytes | memoryview) -> int:
    """The inverse of :func:`integer_to_bytes`."""
    return int.from_bytes(data, "little", signed=True)


def text_to_bytes(text: str) -> bytes:
    """Encode any Python text, which may contain lone surrogates."""
    return text.encode("utf-8", "surrogatepass")


def text_from_bytes(data: bytes | memoryview) -> str:
    """The inverse of :func:`text_to_bytes`. Raises UnicodeDecodeError."""
    return bytes(data).decode("utf-8", "surrogatepass")


class Decoder:
    """Decodes values of one type, which may be a union of structs."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind, ext_hook=_from_extension).decode

    def decode(self, data: bytes | memoryview) -> Any:
        """Decode one value. Raises :class:`MessageError` for bytes that are not a value of the type."""
        try:
            return self._decode(data)
        # Beyond msgspec's own errors: damaged extensions, and lists nested too deep.
        except (ValueError, RecursionError) as error:
            raise MessageError(f"{len(data)} bytes are not a message expected here: {error}") from error


def _expressible(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {name: _expressible(getattr(value, name)) for name in value.__struct_fields__}
        config = value.__struct_config__
        return fields if config.tag is None else {str(config.tag_field): config.tag, **fields}
    if isinstance(value, dict):
        return {_expressible(key): _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_expressible(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _exact(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_TEXT, text_to_bytes(value))
        return value
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_INTEGER, integer_to_bytes(value))
    return _expressible(value)


def _from_extension(code: int, data: memoryview) -> int | str:
    if code == _INTEGER:
        return integer_from_bytes(data)
    if code == _TEXT:
        return text_from_bytes(data)
    raise ValueError(f"graftlab does not send extension {code}")
