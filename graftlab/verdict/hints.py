"""Hints at the mechanism: a simple change of the baseline's tensor that gives the target's.

A hint is a guess that the tensors support, with its fit: the share of the difference that it explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GOOD_FIT = 0.99
"""The least share of the difference, as a norm, that a change must explain to be reported."""
_FEWEST_ROWS = 4
_LONGEST_PERMUTED = 2048
_SAMPLED = 4096
_NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Hint:
    """A change that explains a share, ``fit``, of the difference: 1 is all of it.

    ``spans`` are the places to which the difference is confined: a dimension, its first index and its last.
    """

    text: str
    fit: float
    spans: tuple[tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        percent = math.floor(self.fit * 1e4) / 100
        return f"{self.text} (explains {percent:g} % of the difference)"


def hint_of(baseline: Tensor, target: Tensor) -> Hint | None:
    """The simplest change that turns ``baseline`` into ``target``; None if no known change does.

    If the two differ only at some places of a dimension, the hint names them, and the change is sought there.
    """
    are_real = baseline.is_floating_point() and target.is_floating_point()
    if baseline.shape != target.shape or baseline.numel() == 0 or not are_real:
        return None
    x, y = baseline.double(), target.double()
    finite = x.isfinite() & y.isfinite()
    if not finite.all():
        count = int((~y.isfinite() & x.isfinite()).sum())
        return Hint(f"{count} of {y.numel()} numbers are not finite on the target only", 1.0) if count else None
    if torch.equal(x, y):
        return None
    where, places = _confined(x, y, _at_few)
    if not where:
        found = next(_changes(x, y, _WHOLE), None)
        if found is not None:
            return found
        where, places = _confined(x, y, _at_few, _from_some, _at_every_nth)
    if not where:
        return _in_few_rows(x, y, baseline.dtype) or next(_changes(x, y, _FITTED), None)
    spans = tuple((dim, int(chosen[0]), int(chosen[-1])) for dim, chosen in places.items() if _is_span(chosen))
    for dim, chosen in places.items():
        x, y = x.index_select(dim, chosen), y.index_select(dim, chosen)
    found = next(_changes(x, y, (*_WHOLE, *_FITTED)), None)
    if found is None:
        return Hint(f"the sides differ only at {where}", 1.0, spans)
    return Hint(f"only at {where}, {found.text}", found.fit, spans)


def _confined(x: Tensor, y: Tensor, *patterns: Pattern) -> tuple[str, dict[int, Tensor]]:
    """The places of each dimension where the two differ, in words and as indices, if they form a pattern."""
    off = (x - y).abs()
    # Rounding does not count beside differences a thousand times larger.
    differs = off > off.max() * 1e-4
    # Where both are zero they agree whatever is wrong.
    known = (x != 0) | (y != 0)
    confined, places = [], {}
    for dim, extent in enumerate(x.shape):
        others = [d for d in range(x.dim()) if d != dim]
        chosen, shown = (_any(mask, others).nonzero().flatten() for mask in (differs, known))
        if not 0 < len(chosen) < extent or (len(chosen) > extent // 2 and len(shown) < extent):
            continue
        text = next((text for pattern in patterns if (text := pattern(chosen, extent, dim, dim == x.dim() - 1))), None)
        if text:
            confined.append(text)
            places[dim] = chosen
    return " and ".join(confined), places


Pattern = Callable[[Tensor, int, int, bool], str | None]
"""Describes the indices of a dimension at which tensors differ, given its extent, its number, and whether it is the
last; None if there is no pattern.
"""


def _at_few(chosen: Tensor, extent: int, dim: int, is_last: bool) -> str | None:
    """One index, or a span, in at most half of the dimension."""
    if len(chosen) > extent // 2 or not _is_span(chosen):
        return None
    first, last = int(chosen[0]), int(chosen[-1])
    if first == last:
        return f"index {first} of dim {dim}{' (the last)' if last == extent - 1 else ''}"
    size = len(chosen)
    since = _since(first, last, extent)
    # A head, or the shard of a rank.
    part = f" (equal part {first // size} of 0-{extent // size - 1})" if not (extent % size or first % size) else ""
    return f"indices {first}-{last} of dim {dim}{(part or since) if is_last else (since or part)}"


def _from_some(chosen: Tensor, extent: int, dim: int, is_last: bool) -> str | None:
    """All indices from one on, or all up to one."""
    first, last = int(chosen[0]), int(chosen[-1])
    if not _is_span(chosen) or (first > 0 and last < extent - 1):
        return None
    return f"indices {first}-{last} of dim {dim}{_since(first, last, extent)}"


def _since(first: int, last: int, extent: int) -> str:
    if last == extent - 1:
        return " (to the end)"
    return f" (the first {last + 1})" if first == 0 else ""


def _at_every_nth(chosen: Tensor, extent: int, dim: int, is_last: bool) -> str | None:
    """Every second index, or every third, and so on."""
    if len(chosen) < _FEWEST_ROWS:
        return None
    steps = chosen.diff()
    step, first = int(steps[0]), int(chosen[0])
    if not bool((steps == step).all()) or first >= step or int(chosen[-1]) + step < extent:
        return None
    which = {2: "second", 3: "third", 4: "fourth"}.get(step, f"{step}th")
    return f"every {which} index of dim {dim}, from {first}"


def _in_few_rows(x: Tensor, y: Tensor, dtype: torch.dtype) -> Hint | None:
    """In low precision: a sentence on the rows that are further apart than rounding, if they are few.

    A router chooses by values that may be within one rounding of each other. Then a token's whole row may be off.
    """
    if dtype.itemsize != 2 or x.dim() < 2:
        return None
    off = (y - x).square().mean(-1).flatten() / x.square().mean()
    rounding = torch.finfo(dtype).eps ** 2
    far = int((off > _FAR_ROW**2 * rounding).sum())
    if not 0 < far <= len(off) // _FEWEST_ROWS or float(off.median()) > _NEAR_ROW**2 * rounding:
        return None
    return Hint(
        f"only {far} of {len(off)} rows (last dim) differ by more than rounding: if a router makes a choice for each "
        "row, it chose differently there, which rounding can cause",
        1.0,
    )


_FAR_ROW, _NEAR_ROW = 8.0, 2.0
"""From how many roundings of its values on a row is off entirely, and how many roundings explain the median row."""


def _any(mask: Tensor, dims: list[int]) -> Tensor:
    """Reduce these dimensions, the last one first, so that the others keep their numbers."""
    for dim in sorted(dims, reverse=True):
        mask = mask.any(dim)
    return mask


def _is_span(chosen: Tensor) -> bool:
    return int(chosen[-1]) - int(chosen[0]) + 1 == len(chosen)


def _changes(x: Tensor, y: Tensor, tells: Sequence[Callable[[Tensor, Tensor], Tell]]) -> Iterator[Hint]:
    """The changes that fit, in this order."""
    for tell in tells:
        for text, changed in tell(x, y):
            hint = Hint(text, 1.0 - float((y - changed).norm() / (y - x).norm()))
            if hint.fit >= GOOD_FIT:
                yield hint


Tell = Iterator[tuple[str, Tensor]]
"""Changes of the baseline's values, in words and as a tensor."""


def _constant(x: Tensor, y: Tensor) -> Tell:
    if not y.any():
        yield "the target's values are all zero", torch.zeros_like(x)
    elif y.numel() > 1 and (y == y.flatten()[0]).all() and (x != x.flatten()[0]).any():
        # For example weights that were never updated. Any coarse enough rounding would explain them too.
        yield f"the target's values are all {float(y.flatten()[0]):.6g}", y


def _factor(x: Tensor, y: Tensor) -> Tell:
    yield "the sign is flipped", -x
    square = float(x.square().sum())
    if square and x.numel() > 1:
        factor = float((x * y).sum()) / square
        if factor:
            yield f"the target's values are {_number(factor)} times the baseline's", factor * x


def _number(factor: float) -> str:
    """A factor as a plain fraction if it is very close to one, else in digits."""
    for below in (1, 2, 3, 4, 8):
        above = round(factor * below)
        if abs(factor * below - above) < 1e-4 * abs(above):
            return f"{above}" if below == 1 else f"{above}/{below}"
    root = factor * abs(factor)
    for below in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        for value, text in ((root * below, "1/sqrt({})"), (root / below, "sqrt({})")):
            if below > 1 and abs(value - 1) < 1e-4:
                return f"{factor:.4g} = {text.format(below)}"
    return f"{factor:.6g}"


def _rounded(x: Tensor, y: Tensor) -> Tell:
    for dtype in _NARROW:
        rounded = x.to(dtype).double()
        if rounded.isfinite().all() and not torch.equal(rounded, x):
            yield f"the baseline's values rounded to {str(dtype).removeprefix('torch.')}", rounded


def _clamped(x: Tensor, y: Tensor) -> Tell:
    low, high = float(y.min()), float(y.max())
    # A constant is no clamp.
    if x.numel() > 2 and low < high and (float(x.min()) < low or float(x.max()) > high):
        yield f"the baseline's values clamped to [{low:.4g}, {high:.4g}]", x.clamp(low, high)


def _offset(x: Tensor, y: Tensor) -> Tell:
    if x.numel() > 1:
        mean = float((y - x).mean())
        yield f"the target's values are the baseline's + {mean:.6g}", x + mean
    for dims in (1, 2):
        rows = math.prod(x.shape[:-dims])
        if x.dim() > dims and rows >= _FEWEST_ROWS:
            offset = (y - x).flatten(0, x.dim() - dims - 1).mean(0)
            what = "dim" if dims == 1 else "two dims"
            yield (
                f"one vector over the last {what} is added everywhere (a bias that is missing, or added twice)",
                x + offset,
            )


def _moved(x: Tensor, y: Tensor) -> Tell:
    for dim, extent in enumerate(x.shape):
        if extent >= _FEWEST_ROWS:
            for by in dict.fromkeys((1, -1, *_shift(x, y, dim))):
                shifted = x.roll(by, dim)
                # The edge has no values of the baseline.
                edge = (slice(None),) * dim + (slice(0, by) if by > 0 else slice(extent + by, extent),)
                shifted[edge] = y[edge]
                places = "one place" if abs(by) == 1 else f"{abs(by)} places"
                yield f"shifted along dim {dim} by {places}, to {'later' if by > 0 else 'earlier'} indices", shifted
        if extent % 2 == 0:
            yield f"the halves of dim {dim} are swapped", x.roll(extent // 2, dim)
        if extent >= 4 and extent % 2 == 0:
            before, after = x.shape[:dim], x.shape[dim + 1 :]
            pairs, halves = (
                x.reshape(*before, *split, *after).transpose(dim, dim + 1).reshape(x.shape)
                for split in ((extent // 2, 2), (2, extent // 2))
            )
            yield (
                f"dim {dim} has its even and odd elements in separate halves, where the baseline interleaves them",
                pairs,
            )
            yield f"dim {dim} interleaves its halves, where the baseline keeps them apart", halves
        if extent > 1:
            yield f"dim {dim} is reversed", x.flip(dim)
    for one in range(x.dim()):
        for other in range(one + 1, x.dim()):
            if x.shape[one] > 1 and x.shape[other] > 1:
                turned = x.transpose(one, other).reshape(x.shape)
                yield f"dims {one} and {other} are transposed", turned


def _shift(x: Tensor, y: Tensor, dim: int) -> list[int]:
    """How many places the middle row of the target has moved, if at most a quarter of the dimension."""
    extent = x.shape[dim]
    rows = x.movedim(dim, 0).reshape(extent, -1)[:, :_SAMPLED]
    middle = extent // 2
    row = y.select(dim, middle).reshape(-1)[:_SAMPLED]
    by = middle - int((rows - row).square().sum(1).argmin())
    return [by] if 0 < abs(by) <= extent // 4 else []


def _permuted(x: Tensor, y: Tensor) -> Tell:
    for dim, extent in enumerate(x.shape):
        if extent > _LONGEST_PERMUTED:
            continue
        mine, theirs = (each.movedim(dim, 0).reshape(extent, -1)[:, :_SAMPLED] for each in (x, y))
        order = torch.cdist(theirs, mine).argmin(1)
        if len(set(order.tolist())) == extent and not torch.equal(order, torch.arange(extent, device="cpu")):
            shown = ", ".join(map(str, order[:8].tolist())) + (", ..." if extent > 8 else "")
            yield f"dim {dim} is permuted (the target has the baseline's {shown})", x.index_select(dim, order)


def _by_channel(x: Tensor, y: Tensor) -> Tell:
    text = "each place of the last dim has its own factor, as when a scale's or a norm's weight differs"
    yield from _scaled(x, y, tuple(range(x.dim() - 1)), text)


def _by_row(x: Tensor, y: Tensor) -> Tell:
    text = "each row (last dim) has its own factor, as when a norm's eps or a softmax's sum differs"
    yield from _scaled(x, y, (x.dim() - 1,), text)


def _scaled(x: Tensor, y: Tensor, dims: tuple[int, ...], text: str) -> Tell:
    if x.dim() < 2 or math.prod(x.shape[dim] for dim in dims) < _FEWEST_ROWS:
        return
    squares = x.square().sum(dims, keepdim=True)
    factors = torch.where(squares > 0, (x * y).sum(dims, keepdim=True) / squares.clamp_min(1e-300), 1.0)
    yield f"{text} ({float(factors.min()):.4g} to {float(factors.max()):.4g})", factors * x


_WHOLE = (_constant, _factor, _rounded, _clamped, _offset, _moved, _permuted)
"""Changes of a whole tensor, the simplest first."""
_FITTED = (_by_channel, _by_row)
"""Changes with a fitted number for each row or channel, which fit much just by their many numbers."""
