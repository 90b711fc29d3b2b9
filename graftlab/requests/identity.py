"""Request ids and bootstrap rooms as int64 tensors: a device and a captured graph take no strings."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftlab.errors import RequestError
from graftlab.requests.request_id import request_id_to_int

PADDING_ID = 0
"""In place of an id, in rows of a batch that belong to no request."""

NO_ROOM = -1
"""In place of a bootstrap room, for a request that has none."""

IDENTITIES = ("rids_int", "bootstrap_room_ids_int")
"""The names of these tensors in batches."""

_INT64 = torch.iinfo(torch.int64)


def request_ids_tensor(request_ids: Sequence[str], device: torch.device | str = "cpu") -> torch.Tensor:
    """``[B]`` int64: each request's id as :func:`request_id_to_int` makes it.

    A request that is sampled several times has as many rows, which their order distinguishes.

    Raises :class:`RequestError` for two ids that share a number (one in 2**64), and for an id with the padding's.

    >>> from graftlab.requests import request_ids_tensor
    >>> request_ids_tensor(["req-0", "req-1"]).shape
    torch.Size([2])
    """
    numbers = [request_id_to_int(each) for each in request_ids]
    if len(set(numbers)) < len(set(request_ids)):
        named: dict[int, set[str]] = {}
        for number, each in zip(numbers, request_ids, strict=True):
            named.setdefault(number, set()).add(each)
        shared = [sorted(ids) for ids in named.values() if len(ids) > 1]
        raise RequestError(f"request ids {shared} share a number; rows could not be told apart: rename one of each")
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
