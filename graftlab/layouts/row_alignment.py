"""Which row of one tensor is which of another, by values: rows of token ids, or of embeddings, in any order."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graftlab.base.tensor_bytes import real_parts

Index = npt.NDArray[np.int64]

# The most candidates that are compared with a row.
_NEAR = 64
# The most rows that are compared to choose between stretches of rows.
_AHEAD = 512
_NONE = np.empty(0, np.int64)
# The number of random projections that stand for a row of values.
_WIDTH = 8
# Projections of a row may differ by more than its values, because the random directions vary.
_SPREAD = 3.0


@dataclass(frozen=True)
class ShownRows:
    """The rows of one call, along the dimensions ``dims``, with ``width`` numbers that identify each.

    A token id is its own number. ``limit`` is the largest relative distance between two equal rows.
    """

    dims: tuple[int, ...]
    width: int
    limit: float
    numbers: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> ShownRows:
        """Make them from a tensor of token ids ``[...]``, or of values ``[..., features]``."""
        value = tensor.detach()
        if value.is_complex():
            value = real_parts(value).flatten(-2)
        if not value.is_floating_point():
            ids = value.reshape(-1).double().cpu()
            return cls(tuple(value.shape), 1, 0.0, ids.numpy().tobytes())
        drawn = _drawn(value.shape[-1]).to(value.device)
        numbers = (value.flatten(0, -2).double().nan_to_num() @ drawn).cpu()
        limit = 3e-2 if torch.finfo(value.dtype).eps > 1e-4 else 1e-3
        return cls(tuple(value.shape[:-1]), _WIDTH, _SPREAD * limit, numbers.float().numpy().tobytes())

    @property
    def count(self) -> int:
        return math.prod(self.dims)

    @property
    def rows(self) -> npt.NDArray[np.float64]:
        """The numbers, ``[rows, width]``."""
        dtype = np.float64 if self.width == 1 else np.float32
        return np.frombuffer(self.numbers, dtype).astype(np.float64).reshape(-1, self.width)


@functools.lru_cache(maxsize=16)
def _drawn(width: int) -> Tensor:
    """Random directions, equal on every rank."""
    made = torch.randn(width, _WIDTH, generator=torch.Generator().manual_seed(width), dtype=torch.float64, device="cpu")
    return torch.nn.functional.normalize(made, dim=0)


@dataclass(frozen=True, eq=False)
class FoundRows:
    """The row of a whole with dimensions ``of`` at each place of a part with dimensions ``into``; -1 for none."""

    of: tuple[int, ...]
    into: tuple[int, ...]
    index: Index

    @property
    def inverse(self) -> FoundRows:
        """The part's row at each place of the whole."""
        return FoundRows(self.into, self.of, inverted(self.index, math.prod(self.of)))


def inverted(index: Index, size: int) -> Index:
    """The place in ``index`` of each number below ``size``; -1 for a number that it lacks."""
    found = np.full(size, -1, np.int64)
    found[index[index >= 0]] = np.flatnonzero(index >= 0)
    return found


def rows_between(of: Sequence[ShownRows], into: Sequence[ShownRows]) -> FoundRows:
    """The rows of the last call of ``of`` that are in the last call of ``into``; both have the calls of a step so far.

    The side with fewer rows has some of the other's. If several calls have the rows of one, such as a prefill and
    decode steps beside a single pass, each begins where the previous one ended.
    """
    if into[-1].count <= of[-1].count:
        return _contained(of, into)
    return _contained(into, of).inverse


def _contained(outer: Sequence[ShownRows], inner: Sequence[ShownRows]) -> FoundRows:
    whole, part = outer[-1], inner[-1]
    place = -1
    if len(outer) == 1:
        for before in inner[:-1]:
            index = _index(whole, before, place)
            place = int(index[-1]) if len(index) else place
    return FoundRows(whole.dims, part.dims, _index(whole, part, place))


@functools.lru_cache(maxsize=64)
def _index(outer: ShownRows, inner: ShownRows, place: int) -> Index:
    if outer.width != inner.width:
        return np.full(inner.count, -1, np.int64)
    lengths = sequence_lengths(outer.dims, inner.dims)
    classes, own = _classes(outer.rows, inner.rows, max(outer.limit, inner.limit))
    distinct = len(np.unique(classes))
    while True:
        index = _aligned(classes, own, place, lengths)
        found = _coincidences(index, len(classes), distinct, lengths)
        if not found:
            return index
        # Without the shortest stretches, their rows are free for the sequences that they belong to.
        shortest = min(map(len, found))
        own[np.concatenate([each for each in found if len(each) == shortest])] = -1


def _coincidences(index: Index, count: int, distinct: int, lengths: tuple[int, int]) -> list[Index]:
    """Stretches of rows that are probably equal by chance, such as a few words that two sequences share.

    A complete sequence is no coincidence, and neither is a stretch too long to arise by chance in such rows.
    """
    length, own_length = lengths[0] or count, lengths[1] or len(index)
    chance = 1 + math.log(max(2, count)) / math.log(max(2, distinct))
    found: list[Index] = []
    known = np.flatnonzero(index >= 0)
    breaks = np.flatnonzero((np.diff(known) != 1) | (np.diff(index[known]) != 1)) + 1
    for stretch in np.split(known, breaks):
        if len(stretch) == 0 or len(stretch) > chance:
            continue
        first, end = int(stretch[0]), int(stretch[-1]) + 1
        whole_part = first % own_length == 0 and end % own_length == 0
        whole_sequence = lengths[0] > 0 and index[first] % length == 0 and (index[end - 1] + 1) % length == 0
        follows = first > 0 and first % own_length > 0 and index[first - 1] >= 0 and lengths[0] > 0
        same = follows and index[first - 1] // length == index[first] // length
        if not (whole_part or whole_sequence or same):
            found.append(stretch)
    return found


def aligned(
    outer: npt.NDArray[np.float64],
    inner: npt.NDArray[np.float64],
    limit: float,
    place: int = -1,
    lengths: tuple[int, int] = (0, 0),
) -> tuple[Index, float]:
    """The row of ``outer`` that each row of ``inner`` is, or -1, and how well the rows are distinguished, from 0 to 1.

    Rows with equal values, such as those of one token, are distinguished by the rows beside them. The longest stretch
    wins, then the one after ``place``, then one at whose end the part has no further rows of the whole. No row is taken
    twice. A single row is the one after ``place``, or the last. ``lengths`` are the common lengths of padded sequences
    in ``outer`` and ``inner``; a sequence then has the rows of one sequence, in order.
    """
    classes, own = _classes(outer, inner, limit)
    index = _aligned(classes, own, place, lengths)
    counts = np.bincount(classes)
    return index, float((1 / counts[own[own >= 0]]).sum()) / max(1, len(own))


def _aligned(classes: Index, own: Index, place: int, lengths: tuple[int, int]) -> Index:
    """See :func:`aligned`; rows are given by class, and -1 is a row that the other side lacks."""
    length, own_length = (each or max(1, len(rows)) for each, rows in zip(lengths, (classes, own), strict=True))
    positions: dict[int, Index] = {
        int(each): np.flatnonzero(classes == each) for each in np.unique(own[own >= 0]).tolist()
    }
    index = np.full(len(own), -1, np.int64)
    free = np.ones(len(classes), bool)
    at = 0
    while at < len(own):
        begins = at - at % own_length
        before = index[begins:at]
        last = int(before[before >= 0][-1]) if lengths[1] and (before >= 0).any() else -1
        places = positions.get(int(own[at]), _NONE)
        candidates = places[free[places]]
        if last >= 0:
            # The rest of a sequence follows the part that was found.
            end = last - last % length + length
            within = (candidates > last) & (candidates < end) if lengths[0] else candidates == last + 1
            candidates = candidates[within]
        if not len(candidates):
            # The other side lacks this row, or has fewer of it, as of padding.
            at += 1
            continue
        # If both sides pad their sequences, the next sequence may be anywhere.
        following = -1 if all(lengths) and at == begins else (int(index[at - 1]) if at else place) + 1
        is_last = place >= 0 or len(own) == 1
        most = np.minimum(length - candidates % length, min(own_length - at % own_length, _AHEAD))
        longest = _longest(classes, own, free, candidates, at, most)
        start, stretch = max(
            longest,
            key=lambda each: (
                each[0] == following,
                sum(each) % length == 0 or int(classes[sum(each)]) not in positions,
                all(lengths) and each[0] // length == at // own_length,
                each[0] if is_last else -each[0],
            ),
        )
        # Two sequences may begin alike. Rows before this stretch belong to it if they fit, and are taken from a row
        # that matched alone.
        back = 0
        while start % length > back and at % own_length > back and classes[start - back - 1] == own[at - back - 1]:
            row, mine = start - back - 1, at - back - 1
            if not free[row]:
                (other,) = np.flatnonzero(index[:at] == row)
                beside = [index[each] == row + each - other for each in (other - 1, other + 1) if 0 <= each < at]
                if any(beside):
                    break
                index[other] = -1
            if index[mine] >= 0:
                free[index[mine]] = True
                index[mine] = -1
            back += 1
        index[at - back : at + stretch] = np.arange(start - back, start + stretch)
        free[start - back : start + stretch] = False
        at += stretch
    return index


def sequence_lengths(outer: Sequence[int], inner: Sequence[int]) -> tuple[int, int]:
    """The lengths of padded sequences, from the dimensions of both sides' rows; 0 for a single sequence."""
    lengths = [dims[-1] if math.prod(dims[:-1]) > 1 else 0 for dims in (outer, inner)]
    return lengths[0], lengths[1]


def _longest(
    classes: Index, own: Index, free: npt.NDArray[np.bool_], starts: Index, at: int, most: Index
) -> list[tuple[int, int]]:
    """The ``starts`` of the longest stretches of equal classes, up to a row that is taken, with their lengths."""
    count = 1
    while len(starts) > 1:
        further = most > count
        reached = np.where(further, starts + count, 0)
        further &= free[reached] & (classes[reached] == own[min(at + count, len(own) - 1)])
        if not further.any():
            return [(start, count) for start in starts.tolist()]
        starts, most, count = starts[further], most[further], count + 1
    start, size = int(starts[0]), int(most[0])
    ends = np.flatnonzero((classes[start : start + size] != own[at : at + size]) | ~free[start : start + size])
    return [(start, int(ends[0]) if len(ends) else size)]


def _classes(outer: npt.NDArray[np.float64], inner: npt.NDArray[np.float64], limit: float) -> tuple[Index, Index]:
    """A class for each distinct outer row, and for each inner row the class of the equal outer row, or -1."""
    distinct, classes = np.unique(outer, axis=0, return_inverse=True)
    different, which = np.unique(inner, axis=0, return_inverse=True)
    if distinct.shape[1] == 1:
        # Token ids have no rounding.
        at = np.searchsorted(distinct[:, 0], different[:, 0]).clip(max=len(distinct) - 1)
        found = np.where(distinct[at, 0] == different[:, 0], at, -1)
        return classes.reshape(-1), found[which.reshape(-1)]
    drawn = np.random.default_rng(0).standard_normal((distinct.shape[1],))
    direction = drawn / math.sqrt(float(drawn @ drawn))
    shadows, own = np.nan_to_num(distinct) @ direction, np.nan_to_num(different) @ direction
    order = np.argsort(shadows)
    found = np.full(len(different), -1, np.int64)
    for number, row in enumerate(np.nan_to_num(different)):
        size = math.sqrt(float(row @ row))
        reach = limit * size
        low, high = np.searchsorted(shadows[order], [own[number] - reach, own[number] + reach])
        near = order[low:high]
        if len(near) > _NEAR:
            near = near[np.argsort(np.abs(shadows[near] - own[number]))[:_NEAR]]
        if len(near):
            apart = np.linalg.norm(distinct[near] - row, axis=1)
            nearest = int(apart.argmin())
            if float(apart[nearest]) <= reach:
                found[number] = near[nearest]
    return classes.reshape(-1), found[which.reshape(-1)]
