"""Request ids and bootstrap rooms as int64 tensors: a device and a captured graph take no strings."""

from __future__ import annotations

import os
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


REQUEST_IDS_VARIABLE = "GRAFTLAB_REQUEST_IDS"
"""The environment variable that switches these tensors on where the code does not say."""


def is_switched_on() -> bool:
    """Whether the environment asks for request ids. Raises :class:`RequestError` for a value other than 1 or 0."""
    text = os.environ.get(REQUEST_IDS_VARIABLE, "").strip().lower()
    if text not in ("", "0", "1", "true", "false", "yes", "no", "on", "off"):
        raise RequestError(f"{REQUEST_IDS_VARIABLE} is {text!r}; it takes 1 or 0")
    return text in ("1", "true", "yes", "on")


def request_ids_tensor(
    request_ids: Sequence[str] | None = None,
    device: torch.device | str = "cpu",
    *,
    rids: Sequence[str] | None = None,
) -> torch.Tensor:
    """``[B]`` int64: each request's id as :func:`request_id_to_int` makes it. ``rids`` is SGLang's name of the ids.

    A request that is sampled several times has as many rows, which their order distinguishes.

    Raises :class:`RequestError` for two ids that share a number (one in 2**64), and for an id with the padding's.

    >>> from graftlab.requests import request_ids_tensor
    >>> request_ids_tensor(["req-0", "req-1"]).shape
    torch.Size([2])
    """
    if (request_ids is None) == (rids is None):
        raise TypeError("request_ids_tensor() takes the ids once, as request_ids or as rids")
    request_ids = rids if request_ids is None else request_ids
    assert request_ids is not None
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
