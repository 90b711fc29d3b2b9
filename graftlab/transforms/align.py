"""The built-in transform that pairs the rows of two batches by request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.base.tensor_bytes import copyable
from graftlab.errors import TransformError
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.inputs import GraftTransformInput, Outcome

_HOW = 'gl.tap(name, x, extras={"rids_int": ids}), with ids an int64 tensor of one id per request'
# The id of rows without a request; see graftlab.requests.identity.
_PADDING_ID = 0

MOVED = "the sides have the requests in different rows"
"""The note of an outcome whose rows were taken from other places."""


def align_by_request(graft_input: GraftTransformInput) -> Outcome:
    """Take each row from the sender that has the same request, whatever the order, size or padding of the batches.

    Both sides pass ``extras={"rids_int": ids}``: one int64 id per request, as
    :func:`graftlab.requests.identity.request_ids_tensor` makes them; 0 marks padding. Without ``"request_lens"`` row i
    of the tensor belongs to request i. With it, request i has ``request_lens[i]`` tokens, and the tensor is either
    flat, ``[tokens, ...]`` or ``[heads, tokens, ...]`` with one request after the other, or padded on the right,
    ``[requests, longest, ...]`` or ``[requests, heads, longest, ...]``. The lengths show which dimension has the
    tokens. The n-th token of a request is paired with its n-th token on the other side, so the two sides may use
    different layouts. Rows after the last request are padding.

    Where the sides have the requests in different rows, a note mentions it. Rows without a counterpart keep the
    receiver's values and are counted in ``rows_unmatched``; padding is not counted.
    A request that several senders have is taken from the one with the receiver's rank, or else from the first. An id
    may occur several times, as for a request with several samples: the first is paired with the first, and so on. If no
    rank passed ids, the default transform applies.

    Raises :class:`TransformError` if only some ranks passed ids, if the extras are unusable, if the lengths fit no
    dimension or several, and if rows differ in shape.

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
    senders = graft_input.senders or list(range(len(graft_input.received_list)))
    arrived = zip(senders, graft_input.received_list, graft_input.received_extras_list, strict=True)
    own = _readings(target, graft_input.target_extras, "the receiver")
    sent = [(rank, _readings(tensor, extras, f"sender {rank}")) for rank, tensor, extras in arrived]
    sent.sort(key=lambda each: (each[0] != graft_input.recv_rank, each[0]))
    mine, *batches = _agreed(own, sent)

    value = target.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    places: list[torch.Tensor] = []
    left, is_moved = dict(mine.requests), False
    for batch in batches:
        shared = [each for each in left if each in batch.requests]
        if not shared:
            continue
        pairs = [(left.pop(each), batch.requests[each]) for each in shared]
        lengths = [min(here.length, there.length) for here, there in pairs]
        here = _places([place.start for place, _ in pairs], lengths)
        there = _places([place.start for _, place in pairs], lengths)
        is_moved = is_moved or not torch.equal(here, there)
        rows = copyable(batch.rows_of(batch.tensor))[batch.indices(there)].view(batch.tensor.dtype).to(value)
        copyable(mine.rows_of(value))[mine.indices(here)] = copyable(rows)
        places.append(here)
    matched = torch.cat(places).sort().values if places else torch.empty(0, dtype=torch.int64, device="cpu")
    wanted = sum(place.length for place in mine.requests.values())
    return Outcome(
        value,
        aligned_by="request",
        rows=mine.elements(matched),
        rows_matched=len(matched),
        rows_unmatched=wanted - len(matched),
        note="; ".join(
            [*filter(None, dict.fromkeys([mine.note, *(each.note for each in batches)])), *[MOVED] * is_moved]
        )
        or None,
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
    """One reading of a side's tensor, in which ``requests`` maps requests to their rows.

    A row is one token: an index of ``token_dim``, or of dimension 0 and ``token_dim`` if the tensor ``is_padded``.
    ``tokens`` is the number of all requests' tokens. A reading ``is_unlikely`` if a different one fits more closely.
    """

    tensor: torch.Tensor
    token_dim: int
    is_padded: bool
    requests: dict[Sample, _Stretch]
    tokens: int
    is_unlikely: bool
    note: str | None = None

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.rows_of(self.tensor).shape[2 if self.is_padded else 1 :])

    def has_same_rows(self, other: _Batch) -> bool:
        """Whether two readings of a tensor have the same rows in the same places."""
        if self is other:
            return True
        return self.token_dim == other.token_dim and self.tensor.shape[0] == 1

    @property
    def is_exact(self) -> bool:
        """Whether the tensor is not padded, and has as many tokens as the requests."""
        return not self.is_padded and self.tensor.shape[self.token_dim] == self.tokens

    @property
    def described(self) -> str:
        return f"[requests, tokens] in dims 0 and {self.token_dim}" if self.is_padded else f"dim {self.token_dim}"

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor with the dimensions that count rows in front."""
        return tensor.movedim(self.token_dim, 1 if self.is_padded else 0)

    def indices(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the indices of rows in :meth:`rows_of`."""
        rows = rows.to(self.tensor.device)
        if not self.is_padded:
            return (rows,)
        longest = self.tensor.shape[self.token_dim]
        return rows // longest, rows % longest

    def elements(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the indices of rows in the tensor itself, over its dimensions up to the tokens'."""
        indices = self.indices(rows)
        if self.token_dim == len(indices) - 1:
            return indices
        # Between the dimensions that count rows there are others, such as heads, whose every index belongs to a row.
        first = 1 if self.is_padded else 0
        between = self.tensor.shape[first : self.token_dim]
        others = torch.cartesian_prod(*(torch.arange(size, device=rows.device) for size in between)).reshape(
            -1, len(between)
        )
        columns = [index.repeat_interleave(len(others)) for index in indices]
        middle = [others[:, dim].repeat(len(rows)).to(self.tensor.device) for dim in range(len(between))]
        return (*columns[:-1], *middle, columns[-1])


def _readings(tensor: torch.Tensor, extras: Any, whose: str) -> list[_Batch]:
    """Return the readings of a tensor that its lengths allow. Raises :class:`TransformError` if there is none."""
    ids = _integers(extras, "rids_int", whose)
    if ids is None:
        raise TransformError(f"align_by_request: {whose} passed no request ids; write {_HOW}")
    lengths = _integers(extras, "request_lens", whose)
    if lengths is not None and (len(lengths) != len(ids) or min(lengths, default=0) < 0):
        raise TransformError(
            f"align_by_request: {whose} passed {len(ids)} rids_int and request_lens {lengths}; "
            f"each request has one length"
        )
    found = []
    for token_dim, is_padded, is_unlikely in _token_dims(tensor, len(ids), lengths, whose):
        each_length = [1] * len(ids) if lengths is None else lengths
        longest = tensor.shape[token_dim] if is_padded else 0
        starts = [index * longest if is_padded else sum(each_length[:index]) for index in range(len(ids))]
        requests: dict[Sample, _Stretch] = {}
        seen: Counter[int] = Counter()
        for each, start, length in zip(ids, starts, each_length, strict=True):
            if each != _PADDING_ID:
                requests[each, seen[each]] = _Stretch(start, length)
                seen[each] += 1
        found.append(_Batch(tensor, token_dim, is_padded, requests, sum(each_length), is_unlikely))
    return found


def _token_dims(
    tensor: torch.Tensor, count: int, lengths: list[int] | None, whose: str
) -> list[tuple[int, bool, bool]]:
    """Return readings: the tokens' dimension, whether requests are padded, and whether a different one is likelier."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if lengths is None:
        if rows >= count:
            return [(0, False, False)]
        raise TransformError(
            f"align_by_request: {whose} passed {count} rids_int for a tensor of shape {list(tensor.shape)}, which has "
            f"{rows} rows"
        )
    total, longest = sum(lengths), max(lengths, default=0)
    # The last of three or more dimensions has features, not tokens.
    dims = range(1, max(2, tensor.dim() - 1)) if tensor.dim() > 1 else range(0)
    flat = [(dim, False, False) for dim in (0, *dims) if tensor.dim() and tensor.shape[dim] == total]
    padded = [(dim, True, False) for dim in dims if rows == count and tensor.shape[dim] == longest]
    found = [*flat, *padded]
    # Readings with padding beyond the requests or the longest of them.
    if tensor.dim() > 1 and rows >= count and tensor.shape[1] >= longest and (1, True, False) not in padded:
        found.append((1, True, bool(padded) or rows > count))
    if rows > total:
        found.append((0, False, True))
    if not found:
        raise TransformError(
            f"align_by_request: {whose} passed request_lens {lengths}, which fit neither [tokens, ...] nor "
            f"[requests, longest, ...], also with other dimensions before the tokens, for a tensor of shape "
            f"{list(tensor.shape)}"
        )
    return found


def _agreed(own: list[_Batch], sent: Sequence[tuple[int, list[_Batch]]]) -> list[_Batch]:
    """Return the receiver's reading and each sender's, whose rows have one shape."""
    possible = _with_rows_of(own, sent)
    if not possible:
        shapes = {reading.row_shape for reading in own}
        unlike = [each for each in sent if not shapes & {reading.row_shape for reading in each[1]}]
        rank, readings = (unlike or sent)[0]
        raise TransformError(
            f"align_by_request: a row has shape {list(own[0].row_shape)} here and {list(readings[0].row_shape)} at "
            f"sender {rank}; only whole rows can be paired"
        )
    # A sender's unlikely readings count only where its likely ones have no rows like the receiver's.
    likely = _with_rows_of(own, [(rank, _likely(readings)) for rank, readings in sent])
    mine = _only(likely or possible, possible, "the receiver")
    batches = [mine]
    for rank, readings in sent:
        same = [each for each in readings if each.row_shape == mine.row_shape]
        batches.append(_only(same, same, f"sender {rank}"))
    return batches


def _with_rows_of(own: list[_Batch], sent: Sequence[tuple[int, list[_Batch]]]) -> list[_Batch]:
    return [
        mine for mine in own if all(any(each.row_shape == mine.row_shape for each in readings) for _, readings in sent)
    ]


def _likely(readings: list[_Batch]) -> list[_Batch]:
    return [each for each in readings if not each.is_unlikely] or readings


def _only(readings: list[_Batch], possible: list[_Batch], whose: str) -> _Batch:
    """Return the most likely reading. Raises :class:`TransformError` if several are equally likely."""
    first, *others = _likely(readings)
    others = [each for each in others if not first.has_same_rows(each)]
    shape, among = list(first.tensor.shape), " or ".join(each.described for each in possible)
    is_usual = first.token_dim == 0 and first.is_exact
    if others and not is_usual:
        raise TransformError(
            f"align_by_request: the lengths of {whose} fit a tensor of shape {shape} in several ways: the tokens may "
            f"be in {among}. Tap it with the tokens in its first dimension"
        )
    if any(each.is_exact for each in others) if is_usual else any(not first.has_same_rows(each) for each in possible):
        return replace(first, note=f"the tokens of {whose}'s {shape} may be in {among}; {first.described} was taken")
    return first


def _integers(extras: Any, name: str, whose: str) -> list[int] | None:
    value = extras.get(name) if isinstance(extras, Mapping) else None
    if value is None:
        return None
    numbers = value.tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(numbers, (list, tuple)) or any(type(number) is not int for number in numbers):
        raise TransformError(f"align_by_request: {name} of {whose} must be a one-dimensional tensor of integers")
    return list(numbers)


def _places(starts: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    return torch.cat(
        [torch.arange(start, start + length, device="cpu") for start, length in zip(starts, lengths, strict=True)]
    )
