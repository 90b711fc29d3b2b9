"""Which request is which, as int64 tensors: strings go neither onto a device nor through a captured graph."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch

from graftlab.errors import RequestError

PADDING_ID = 0
"""In place of an id, in rows of a batch that belong to no request."""

NO_ROOM = -1
"""In place of a bootstrap room, for a request that has none."""

_INT64 = torch.iinfo(torch.int64)


def request_id_to_int(request_id: str) -> int:
    """The same int64 in every process and on every machine: BLAKE2b with an 8-byte digest of the UTF-8 bytes, read
    little-endian and signed (RFC 7693).

    Raises :class:`RequestError` for what is not a string, or has no UTF-8.

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


def request_ids_tensor(request_ids: Sequence[str], device: torch.device | str = "cpu") -> torch.Tensor:
    """``[B]`` int64: each request's id as :func:`request_id_to_int` makes it.

    Raises :class:`RequestError` for ids that are there twice, or that share a number (one in 2**64), or the padding's.

    >>> from graftlab.requests import request_ids_tensor
    >>> request_ids_tensor(["req-0", "req-1"]).shape
    torch.Size([2])
    """
    numbers = [request_id_to_int(each) for each in request_ids]
    if len(set(numbers)) < len(numbers):
        twice = [request_ids[numbers.index(number)] for number, count in Counter(numbers).items() if count > 1]
        raise RequestError(f"request ids {twice} are more than once in one batch; rows could not be told apart")
    if PADDING_ID in numbers:
        raise RequestError(
            f"the request id {request_ids[numbers.index(PADDING_ID)]!r} has the padding's number; rename it"
        )
    return _tensor(numbers, device)


def bootstrap_rooms_tensor(rooms: Sequence[int | None], device: torch.device | str = "cpu") -> torch.Tensor:
    """``[B]`` int64: each request's bootstrap room, -1 where it has none.

    Raises :class:`RequestError` for a room that is not an integer or does not fit into int64.

    >>> from graftlab.requests import bootstrap_rooms_tensor
    >>> bootstrap_rooms_tensor([7, None])
    tensor([ 7, -1])
    """
    numbers = []
    for index, room in enumerate(rooms):
        if room is None:
            numbers.append(NO_ROOM)
        elif not isinstance(room, int) or isinstance(room, bool):
            raise RequestError(f"bootstrap room {room!r} (request {index} of the batch) is not an integer")
        elif not _INT64.min <= room <= _INT64.max:
            raise RequestError(f"bootstrap room {room} (request {index} of the batch) does not fit into int64")
        else:
            numbers.append(room)
    return _tensor(numbers, device)


def _tensor(numbers: list[int], device: torch.device | str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
