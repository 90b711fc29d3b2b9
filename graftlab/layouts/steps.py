"""Layout steps on a single rank: parts, windows, padding, scaling, packing.

A step makes a tensor from the one before it (``get``) and can be inverted (``put``). If it loses elements, as a part
does, ``put`` fills them with zeros; ``leaves_out`` describes them, so that the zeros are not mistaken for values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.mesh import Mesh

# A file of a recording may have any layout in it. A step makes at most this many times as many elements, or these.
_MOST_TIMES, _MOST_ELEMENTS = 4096, 1 << 24


@dataclass(frozen=True)
class Disagreement:
    """Copies of one value, on different ranks or within a tensor, that are not bitwise equal.

    ``max_abs`` is the largest difference between two of them (nan if one of the pair is nan), ``count`` the number of
    differing elements; ``where`` describes the copies.
    """

    where: str
    count: int
    max_abs: float

    def __str__(self) -> str:
        return f"{self.where}: {self.count} elements differ, by up to {self.max_abs:.3g}"


@dataclass(frozen=True)
class StepContext:
    """The context of a step: the mesh, the rank, and the lengths of the sequences in the batch."""

    mesh: Mesh = field(default_factory=Mesh)
    rank: int = 0
    lengths: tuple[int, ...] | None = None
    disagreements: list[Disagreement] = field(default_factory=list, compare=False)

    def coordinate(self, name: str) -> int:
        return self.mesh.coordinate_of(self.rank, name)

    def compare(self, where: str, first: Tensor, other: Tensor) -> None:
        """Record a difference between two copies of one value."""
        found = disagreement(where, first, other)
        if found is not None:
            self.disagreements.append(found)


def disagreement(where: str, first: Tensor, other: Tensor) -> Disagreement | None:
    """Return how two copies differ; None if they are equal, where nan equals nan."""
    if first.shape != other.shape:
        return Disagreement(f"{where}, of shapes {list(first.shape)} and {list(other.shape)}", other.numel(), math.nan)
    one, two = first.detach(), other.detach()
    if torch.equal(one, two):
        return None
    differs = one != two
    if one.is_floating_point() or one.is_complex():
        differs &= ~(one.isnan() & two.isnan())
    count = int(differs.sum())
    if count == 0:
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    return Disagreement(where, count, float((one[differs].to(wide) - two[differs].to(wide)).abs().max()))


class Step(Protocol):
    """One step of a layout."""

    @property
    def leaves_out(self) -> str | None:
        """A description of the elements that the step loses; None if it loses none."""
        ...

    @property
    def caveat(self) -> str | None:
        """A description of a graft's side effects through this step; None if there are none."""
        ...

    @property
    def text(self) -> str:
        """The step in a layout's text."""
        ...

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        """Apply the step; the result may be a view."""
        ...

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        """Invert the step; the result has ``shape``, if that is given."""
        ...


def dim_of(dim: int, tensor: Tensor, text: str) -> int:
    """Return a dimension's non-negative index. Raises :class:`LayoutError` if the tensor does not have it."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise LayoutError(f"{text}: a tensor of shape {list(tensor.shape)} has no dimension {dim}")
    return dim % tensor.dim()


def call(name: str, **arguments: Any) -> str:
    """Return a step's text: its name and its arguments, without those that are None."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items() if value is not None)})"


def check_count(step: str, name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise LayoutError(f"{step}: {name} must be an int of at least {least}, not {value!r}")


def check_dim(step: str, dim: object) -> None:
    if type(dim) is not int:
        raise LayoutError(f"{step}: dim must be an int, not {dim!r}")


def _filled(like: Tensor, shape: tuple[int, ...], fill: float, step: str) -> Tensor:
    """A tensor of this shape, made from ``like``. Raises :class:`LayoutError` for one that is far larger."""
    if math.prod(shape) > max(_MOST_ELEMENTS, _MOST_TIMES * like.numel()):
        raise LayoutError(f"{step} makes a tensor of {list(shape)} from one of {list(like.shape)}, which is too large")
    return like.new_full(shape, fill)


def _grouped(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """Split one dimension into groups and their elements; a view if the tensor is contiguous."""
    shape = tensor.shape
    return tensor.reshape((*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :]))


@dataclass(frozen=True)
class Part:
    """Part ``index`` of a dimension that was fused from several, in the proportions ``of``.

    With ``groups`` the fused parts alternate: the dimension consists of this number of groups, and each contains all
    parts in their proportions. A fused qkv of 8 query and 2 key/value heads is ``of=(8, 2, 2)`` if all of q comes
    first. It is ``of=(4, 1, 1)`` with ``groups=2`` if the heads of a group are adjacent. Gate and up that alternate row
    by row are ``of=(1, 1)`` with ``groups`` the number of rows of each.
    """

    index: int
    of: tuple[int, ...]
    dim: int = 0
    groups: int = 1
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(self.of))
        check_dim("part", self.dim)
        for size in self.of:
            check_count("part", "each number in of", size)
        if type(self.index) is not int or not 0 <= self.index < len(self.of):
            raise LayoutError(f"part: index must be one of 0..{len(self.of) - 1}, not {self.index!r}")
        check_count("part", "groups", self.groups)

    @property
    def leaves_out(self) -> str | None:
        others = len(self.of) - 1
        return f"the other {others} parts along dim {self.dim}" if others else None

    @property
    def text(self) -> str:
        of = list(self.of)
        return call("part", index=self.index, of=of, dim=self.dim, groups=self.groups if self.groups > 1 else None)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        dim, unit = dim_of(self.dim, before, self.text), sum(self.of) * self.groups
        extent = before.shape[dim]
        if extent % unit:
            raise LayoutError(
                f"{self.text}: dimension {dim} of {list(before.shape)} has {extent} elements, which do not divide "
                f"into {self.groups} x {sum(self.of)}"
            )
        share = extent // unit
        grouped = _grouped(before, dim, self.groups)
        part = grouped.narrow(dim + 1, sum(self.of[: self.index]) * share, self.of[self.index] * share)
        return part.flatten(dim, dim + 1)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        dim = dim_of(self.dim, after, self.text)
        mine = self.of[self.index] * self.groups
        if after.shape[dim] % mine:
            raise LayoutError(
                f"{self.text}: dimension {dim} of {list(after.shape)} does not divide into {mine} for part {self.index}"
            )
        extent = after.shape[dim] // mine * sum(self.of) * self.groups
        whole = _filled(after, (*after.shape[:dim], extent, *after.shape[dim + 1 :]), 0, self.text)
        grouped = _grouped(whole, dim, self.groups)
        share = extent // (sum(self.of) * self.groups)
        place = grouped.narrow(dim + 1, sum(self.of[: self.index]) * share, self.of[self.index] * share)
        place.copy_(_grouped(after, dim, self.groups))
        return whole


@dataclass(frozen=True)
class Window:
    """``length`` elements of a dimension, starting at ``start``, with a stride of ``step``.

    A negative ``start`` counts from the end of the dimension: the last token is ``start=-1, length=1``.
    """

    dim: int
    start: int
    length: int
    step: int = 1
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_dim("window", self.dim)
        check_count("window", "start", self.start, least=-(1 << 62))
        check_count("window", "length", self.length, least=0)
        check_count("window", "step", self.step)

    @property
    def leaves_out(self) -> str | None:
        return f"everything outside {self.text}"

    @property
    def text(self) -> str:
        step = self.step if self.step > 1 else None
        return call("window", dim=self.dim, start=self.start, length=self.length, step=step)

    def _selected(self, before: Tensor) -> Tensor:
        dim = dim_of(self.dim, before, self.text)
        start = self.start + (before.shape[dim] if self.start < 0 else 0)
        if self.length and not 0 <= start <= before.shape[dim] - 1 - (self.length - 1) * self.step:
            raise LayoutError(f"{self.text} reaches beyond dimension {dim} of {list(before.shape)}")
        index = (slice(None),) * dim + (slice(start, start + self.length * self.step, self.step),)
        return before[index].narrow(dim, 0, self.length)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        return self._selected(before)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        if shape is None:
            raise LayoutError(f"{self.text} does not determine the whole tensor's shape; give it")
        whole = after.new_zeros(tuple(shape))
        place = self._selected(whole)
        if place.shape != after.shape:
            raise LayoutError(f"{self.text} of {list(shape)} is {list(place.shape)}, not {list(after.shape)}")
        place.copy_(after)
        return whole


@dataclass(frozen=True)
class Strided:
    """A strided view of the flat whole with ``sizes``, ``strides`` and ``offset``, reshaped to ``shape``.

    For results of matching that no other step describes. The products of ``sizes`` and ``shape`` are equal; a stride of
    0 repeats.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        for name in ("shape", "sizes", "strides"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for size in (*self.shape, *self.sizes):
            check_count("strided", "each number in shape and sizes", size, least=0)
        if len(self.sizes) != len(self.strides) or math.prod(self.sizes) != math.prod(self.shape):
            raise LayoutError(f"{self.text}: each size needs a stride, and sizes must multiply to the shape's product")
        for stride in (*self.strides, self.offset):
            check_count("strided", "strides and offset", stride, least=0)

    @property
    def leaves_out(self) -> str | None:
        return f"everything outside {self.text}"

    @property
    def text(self) -> str:
        lists = {"shape": list(self.shape), "sizes": list(self.sizes), "strides": list(self.strides)}
        return call("strided", **lists, offset=self.offset or None)

    def _selected(self, whole: Tensor) -> Tensor:
        last = self.offset + sum(n * (size - 1) for n, size in zip(self.strides, self.sizes, strict=True))
        if last >= whole.numel():
            raise LayoutError(f"{self.text} reaches beyond the {whole.numel()} elements of {list(whole.shape)}")
        return whole.as_strided(self.sizes, self.strides, self.offset)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        # Strides count from the start of the storage, so a view of a larger tensor is copied first.
        flat = before.contiguous()
        return self._selected(flat.clone() if flat.storage_offset() else flat).reshape(self.shape)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        if shape is None:
            raise LayoutError(f"{self.text} does not determine the whole tensor's shape; give it")
        whole = after.new_zeros(tuple(shape))
        values = after.reshape(self.sizes)
        for dim, stride in enumerate(self.strides):
            if stride == 0 and self.sizes[dim] > 1:
                first = values.narrow(dim, 0, 1)
                at.compare(f"repetitions in {self.text}", first.expand_as(values), values)
                values = first
        kept = tuple(1 if stride == 0 else size for stride, size in zip(self.strides, self.sizes, strict=True))
        whole.as_strided(kept, self.strides, self.offset).copy_(values)
        return whole


@dataclass(frozen=True)
class Pad:
    """A dimension of ``size`` elements padded at its end to ``to``, as in vocabularies; the padding has no meaning.

    It is never compared; after a graft it has the value ``fill``.
    """

    dim: int
    size: int
    to: int
    fill: float = 0.0
    leaves_out: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_dim("pad", self.dim)
        check_count("pad", "size", self.size, least=0)
        check_count("pad", "to", self.to, least=self.size)
        if type(self.fill) not in (int, float):
            raise LayoutError(f"pad: fill must be a number, not {self.fill!r}")

    @property
    def caveat(self) -> str | None:
        if self.size == self.to:
            return None
        padding = f"elements {self.size}..{self.to - 1} of dim {self.dim}"
        return f"a graft fills {padding}, which are padding, with {self.fill:g}"

    @property
    def text(self) -> str:
        return call("pad", dim=self.dim, size=self.size, to=self.to, fill=self.fill or None)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        dim = dim_of(self.dim, before, self.text)
        if before.shape[dim] != self.size:
            raise LayoutError(f"{self.text}: dimension {dim} of {list(before.shape)} is not of size {self.size}")
        if self.to == self.size:
            return before
        after = _filled(before, (*before.shape[:dim], self.to, *before.shape[dim + 1 :]), self.fill, self.text)
        after.narrow(dim, 0, self.size).copy_(before)
        return after

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        dim = dim_of(self.dim, after, self.text)
        if after.shape[dim] != self.to:
            raise LayoutError(f"{self.text}: dimension {dim} of {list(after.shape)} is not of size {self.to}")
        return after.narrow(dim, 0, self.size)


@dataclass(frozen=True)
class Scale:
    """``factor * x + add``, elementwise in the tensor's dtype.

    A round trip is exact if the factor is a power of two and ``add`` is 0; otherwise it rounds once in each direction.
    """

    factor: float = 1.0
    add: float = 0.0
    leaves_out: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.factor) or self.factor == 0 or not math.isfinite(self.add):
            raise LayoutError(
                f"scale: factor must be finite and not 0, and add finite, not {self.factor!r}, {self.add!r}"
            )

    @property
    def caveat(self) -> str | None:
        exact = math.frexp(self.factor)[0] in (0.5, -0.5) and not self.add
        return None if exact else f"{self.text} rounds, so that a graft is not exact to the last bit"

    @property
    def text(self) -> str:
        return call("scale", factor=self.factor, add=self.add or None)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        # A boolean tensor here is a mask of known elements, not a value.
        if before.dtype == torch.bool:
            return before
        scaled = before * self.factor
        return scaled + self.add if self.add else scaled

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        if after.dtype == torch.bool:
            return after
        return (after - self.add if self.add else after) / self.factor


def _lengths(at: StepContext, step: str) -> tuple[int, ...]:
    if at.lengths is None:
        raise LayoutError(f"{step} needs the lengths of sequences: pass lengths=..., or put them into gl.tap's extras")
    return at.lengths


def _check_padded(tensor: Tensor, lengths: tuple[int, ...], step: str) -> None:
    if tensor.dim() < 2 or tensor.shape[0] != len(lengths) or tensor.shape[1] < max(lengths, default=0):
        raise LayoutError(
            f"{step}: {len(lengths)} sequences of up to {max(lengths, default=0)} tokens need a tensor [batch, tokens, "
            f"...] of at least that size, not {list(tensor.shape)}"
        )


def _packed(padded: Tensor, lengths: tuple[int, ...], step: str) -> Tensor:
    _check_padded(padded, lengths, step)
    rows = [padded[index, :length] for index, length in enumerate(lengths)]
    return torch.cat(rows) if rows else padded.flatten(0, 1)


def _padded(packed: Tensor, lengths: tuple[int, ...], width: int, step: str) -> Tensor:
    if not packed.dim() or packed.shape[0] != sum(lengths):
        raise LayoutError(
            f"{step}: lengths {list(lengths)} add up to {sum(lengths)}, not to {list(packed.shape)}'s rows"
        )
    padded = _filled(packed, (len(lengths), width, *packed.shape[1:]), 0, step)
    start = 0
    for index, length in enumerate(lengths):
        padded[index, :length].copy_(packed[start : start + length])
        start += length
    return padded


@dataclass(frozen=True)
class Pack:
    """Converts padded ``[batch, tokens, ...]`` to packed ``[all tokens, ...]``, by the lengths of the sequences."""

    text: ClassVar[str] = "pack()"
    # Only padding is left out, which has no meaning.
    leaves_out: ClassVar[str | None] = None
    caveat: ClassVar[str | None] = None

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        return _packed(before, _lengths(at, self.text), self.text)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        lengths = _lengths(at, self.text)
        return _padded(after, lengths, max(lengths, default=0) if shape is None else shape[1], self.text)


@dataclass(frozen=True)
class Unpack:
    """Converts packed ``[all, ...]`` to padded ``[batch, tokens, ...]``: to ``to`` tokens, or to the longest length."""

    to: int | None = None
    leaves_out: ClassVar[str | None] = None
    caveat: ClassVar[str | None] = "a graft fills the padding beyond a sequence's length with 0"

    @property
    def text(self) -> str:
        return call("unpack", to=self.to)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        lengths = _lengths(at, self.text)
        longest = max(lengths, default=0)
        if self.to is not None and self.to < longest:
            raise LayoutError(f"{self.text}: the longest sequence has {longest} tokens")
        return _padded(before, lengths, longest if self.to is None else self.to, self.text)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        return _packed(after, _lengths(at, self.text), self.text)
