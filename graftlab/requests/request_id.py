"""A request's id as a number, the same everywhere; without torch, which reading files does not need."""

from __future__ import annotations

import hashlib

from graftlab.errors import RequestError


def request_id_to_int(request_id: str) -> int:
    """Give the same int64 in every process, on every machine: BLAKE2b with an 8-byte digest of the UTF-8 bytes, read
    little-endian and signed (RFC 7693).

    Raises :class:`RequestError` if it is not a string, or has no UTF-8 encoding.

    >>> from graftlab.requests import request_id_to_int
    >>> request_id_to_int("req-0")
    -8966579018032821426
    """
    if not isinstance(request_id, str):
        raise RequestError(f"a request id is a string, not {type(request_id).__name__} ({request_id!r})")
    try:
        encoded = request_id.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"the request id {request_id!r} cannot be written in UTF-8: {error.reason}") from error
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little", signed=True)
