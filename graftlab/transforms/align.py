"""The built-in transform that pairs the rows of two batches by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graftlab.errors import TransformError
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.inputs import GraftTransformInput, Outcome

_HOW = 'gl.tap(name, x, extras={"rids_int": ids}), with ids an int64 tensor of one id per request'
# The id of rows without a request; see graftlab.requests.identity.
_PADDING_ID = 0


def align_by_request(graft_input: GraftTransformInput) -> Outcome:
    """Take each row from the sender that has the same request, whatever the order, size or padding of the batches.

    Both sides pass ``extras={"rids_int": ids}``: one int64 id per request, as
    :func:`graftlab.requests.identity.request_ids_tensor` makes them; 0 marks padding. Without ``"request_lens"`` row i
    of the tensor belongs to request i. With it, request i has ``request_lens[i]`` tokens, and the tensor is either
    flat, ``[tokens, ...]`` with one request after the other, or padded on the right, ``[requests, longest, ...]``; the
    n-th token of a request is paired with its n-th token on the other side, so the two sides may use different layouts.
    Rows after the last request are padding.

    Rows without a counterpart keep the receiver's values and are counted in ``rows_unmatched``; padding is not counted.
    A request that several senders have is taken from the one with the receiver's rank, or else from the first. An id
    may occur several times, as for a request with several samples: the first is paired with the first, and so on. If no
    rank passed ids, the default transform applies.

    Raises :class:`TransformError` if only some ranks passed ids, if the extras are unusable, and if rows differ in
    shape.

    >>> given = gl.GraftTransformInput(
    ...     {"name": "hidden"},
    ...     received_list=[torch.tensor([[1.0], [2.0], [3.0]])],
    ...     received_extras_list=[{"rids_int": torch.tensor([11, 12, 13])}],
    ...     target=torch.zeros(2, 1),
    ...     target_extras={"rids_int": torch.tensor([13, 11])},
    ... )
    >>> gl.transforms.align_by_request(given).value.tolist()
    [[3.0], [1.0]]
    """
    all_extras = [graft_input.target_extras, *graft_input.received_extras_list]
    if not any(isinstance(extras, Mapping) and extras.get("rids_int") is not None for extras in all_extras):
        return by_layout(graft_input)
    target = graft_input.target
    mine = _Batch.of(target, graft_input.target_extras, "the receiver")
    senders = graft_input.senders or list(range(len(graft_input.received_list)))
    arrived = zip(senders, graft_input.received_list, graft_input.received_extras_list, strict=True)
    batches = [(rank, _Batch.of(tensor, extras, f"sender {rank}")) for rank, tensor, extras in arrived]
    batches.sort(key=lambda each: (each[0] != graft_input.recv_rank, each[0]))

    value = target.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    places: list[torch.Tensor] = []
    left = dict(mine.requests)
    for rank, batch in batches:
        if batch.row_shape != mine.row_shape:
            raise TransformError(
                f"align_by_request: a row has shape {list(mine.row_shape)} here and {list(batch.row_shape)} at sender "
                f"{rank}; only whole rows can be paired"
            )
        shared = [each for each in left if each in batch.requests]
        if not shared:
            continue
        pairs = [(left.pop(each), batch.requests[each]) for each in shared]
        lengths = [min(here.length, there.length) for here, there in pairs]
        here = _places([place.start for place, _ in pairs], lengths)
        there = _places([place.start for _, place in pairs], lengths)
        mine.rows_of(value)[here.to(value.device)] = batch.rows_of(batch.tensor)[there.to(batch.tensor.device)].to(
            value
        )
        places.append(here)
    matched = torch.cat(places).sort().values if places else torch.empty(0, dtype=torch.int64, device="cpu")
    wanted = sum(place.length for place in mine.requests.values())
    rows = torch.unravel_index(matched, target.shape[: mine.row_dims])
    return Outcome(
        value,
        aligned_by="request",
        rows=tuple(index.to(value.device) for index in rows),
        rows_unmatched=wanted - len(matched),
    )


Sample = tuple[int, int]
"""A request's id, and the number of the sample among this request's samples in the batch."""


@dataclass(frozen=True)
class _Stretch:
    """The position of a request's rows, counted over all leading dimensions."""

    start: int
    length: int


@dataclass(frozen=True)
class _Batch:
    """One side's tensor: its first ``row_dims`` dimensions count rows, and ``requests`` maps requests to them."""

    tensor: torch.Tensor
    row_dims: int
    requests: dict[Sample, _Stretch]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[self.row_dims :])

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor with its rows in one dimension; a view if it is contiguous."""
        return tensor if self.row_dims == 1 else tensor.flatten(0, 1)

    @classmethod
    def of(cls, tensor: torch.Tensor, extras: Any, whose: str) -> _Batch:
        ids = _integers(extras, "rids_int", whose)
        if ids is None:
            raise TransformError(f"align_by_request: {whose} passed no request ids; write {_HOW}")
        lengths = _integers(extras, "request_lens", whose)
        if lengths is not None and (len(lengths) != len(ids) or min(lengths, default=0) < 0):
            raise TransformError(
                f"align_by_request: {whose} passed {len(ids)} rids_int and request_lens {lengths}; "
                f"each request has one length"
            )
        row_dims, starts, lengths = _layout(tensor, len(ids), lengths, whose)
        requests: dict[Sample, _Stretch] = {}
        seen: Counter[int] = Counter()
        for each, start, length in zip(ids, starts, lengths, strict=True):
            if each != _PADDING_ID:
                requests[each, seen[each]] = _Stretch(start, length)
                seen[each] += 1
        return cls(tensor, row_dims, requests)


def _layout(
    tensor: torch.Tensor, count: int, lengths: list[int] | None, whose: str
) -> tuple[int, Sequence[int], list[int]]:
    """Return how many dimensions count rows, and the start and number of each request's rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if lengths is None:
        if rows >= count:
            return 1, range(count), [1] * count
        raise TransformError(
            f"align_by_request: {whose} passed {count} rids_int for a tensor of shape {list(tensor.shape)}, which has "
            f"{rows} rows"
        )
    if rows >= sum(lengths):
        starts = [sum(lengths[:index]) for index in range(count)]
        return 1, starts, lengths
    if tensor.dim() > 1 and rows >= count and tensor.shape[1] >= max(lengths, default=0):
        return 2, [index * tensor.shape[1] for index in range(count)], lengths
    raise TransformError(
        f"align_by_request: {whose} passed request_lens {lengths}, which fit neither [tokens, ...] nor "
        f"[requests, longest, ...] for a tensor of shape {list(tensor.shape)}"
    )


def _integers(extras: Any, name: str, whose: str) -> list[int] | None:
    value = extras.get(name) if isinstance(extras, Mapping) else None
    if value is None:
        return None
    numbers = value.tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(numbers, (list, tuple)) or any(type(number) is not int for number in numbers):
        raise TransformError(f"align_by_request: {name} of {whose} must be a one-dimensional tensor of integers")
    return list(numbers)


def _places(starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])
