"""Rearranged dimensions, in the notation of einops: ``"b s (h d) -> b h s d"``.

Not taken from einops, because a layout can also be inverted, and its errors have a position in the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.steps import StepContext

Group = tuple[str, ...]
"""The axes of one dimension; empty for a dimension of size 1."""

ELLIPSIS = "..."
_TOKEN = re.compile(r"\s*(?:(\.\.\.)|([^\W\d]\w*)|(1)(?!\w)|([()]))")


@dataclass(frozen=True)
class Rearrange:
    """Permutes, splits and merges dimensions, and repeats along axes that only the right side has.

    ``sizes`` gives sizes of axes that do not follow from shapes. An axis that is only on the right is a repetition;
    ``1`` is a dimension of size 1; ``...`` stands for the dimensions without names, on both sides.
    """

    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()
    leaves_out: ClassVar[str | None] = None
    caveat: ClassVar[str | None] = None
    position: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.sizes, Mapping):
            object.__setattr__(self, "sizes", tuple(self.sizes.items()))
        object.__setattr__(self, "pattern", " ".join(self.pattern.split()))
        for name, size in self.sizes:
            if type(size) is not int or size < 1:
                raise LayoutError(f"{self.pattern!r}: the size of {name!r} must be an int of at least 1, not {size!r}")
        unknown = {name for name, _ in self.sizes} - {axis for group in (*self._left, *self._right) for axis in group}
        if unknown:
            raise LayoutError(f"{self.pattern!r} has no axis {sorted(unknown)[0]!r}, for which a size is given")
        for axis in self._added:
            if axis not in dict(self.sizes):
                raise self._fault(f"{axis!r} is only on the right, so it needs a size: {axis}=...", axis, right=True)

    # ---- reading the pattern ------------------------------------------------------------------------------------

    @cached_property
    def _sides(self) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        left, arrow, right = self.pattern.partition("->")
        if not arrow or "->" in right:
            raise LayoutError("a rearrangement has one '->'", self.pattern, self.pattern.rfind("->") if arrow else 0)
        groups = self._read(left, 0), self._read(right, len(left) + 2)
        for side, found in zip(("left", "right"), groups, strict=True):
            axes = [axis for group in found for axis in group]
            for axis in axes:
                if axes.count(axis) > 1:
                    raise self._fault(f"{axis!r} occurs twice on the {side}", axis, right=side == "right")
        lost = [axis for group in groups[0] for axis in group if all(axis not in other for other in groups[1])]
        if lost:
            raise self._fault(f"{lost[0]!r} is only on the left; a rearrangement must keep all axes", lost[0])
        if any(ELLIPSIS in group for group in groups[1]) and all(ELLIPSIS not in group for group in groups[0]):
            raise self._fault("'...' is only on the right", ELLIPSIS, right=True)
        return groups

    def _read(self, side: str, offset: int) -> tuple[Group, ...]:
        groups: list[Group] = []
        inside: list[str] | None = None
        place = 0
        while side[place:].strip():
            token = _TOKEN.match(side, place)
            if token is None:
                place += len(side[place:]) - len(side[place:].lstrip())
                raise LayoutError(
                    f"{side[place]!r} is not an axis; use names, 1, ... and ( )", self.pattern, offset + place
                )
            ellipsis, name, one, bracket = token.groups()
            start = offset + token.end() - len(token.group().strip())
            place = token.end()
            if bracket == "(":
                if inside is not None:
                    raise LayoutError("a ( inside a (", self.pattern, start)
                inside = []
            elif bracket == ")":
                if inside is None:
                    raise LayoutError("a ) without its (", self.pattern, start)
                groups.append(tuple(inside))
                inside = None
            elif inside is not None:
                if ellipsis:
                    raise LayoutError("'...' inside ( ) could be split in several ways", self.pattern, start)
                inside += [name] if name else []
            else:
                groups.append((ellipsis or name,) if not one else ())
        if inside is not None:
            raise LayoutError("a ( without its )", self.pattern, offset + len(side.rstrip()))
        return tuple(groups)

    def _fault(self, message: str, axis: str, *, right: bool = False) -> LayoutError:
        start = self.pattern.index("->") if right else 0
        found = re.compile(rf"(?<!\w){re.escape(axis)}(?!\w)").search(self.pattern, start)
        return LayoutError(message, self.pattern, found.start() if found else start)

    @property
    def _left(self) -> tuple[Group, ...]:
        return self._sides[0]

    @property
    def _right(self) -> tuple[Group, ...]:
        return self._sides[1]

    @cached_property
    def _added(self) -> list[str]:
        left = {axis for group in self._left for axis in group}
        return [axis for group in self._right for axis in group if axis not in left]

    # ---- applying and inverting -----------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        sizes = "".join(f", {name}={size}" for name, size in self.sizes)
        return f"rearrange({self.pattern!r}{sizes})" if sizes else self.pattern

    @property
    def keeps_order(self) -> bool:
        """Whether it only splits and merges dimensions, so that all numbers remain in their order."""
        left, right = ([axis for group in side for axis in group] for side in self._sides)
        return left == right

    def with_other_sizes(self, shape: Sequence[int]) -> Rearrange:
        """The same rearrangement of this shape, with the size of the other axis given where a dimension splits in two.

        Of two axes one follows from the shape. Which of them is constant in other shapes cannot be read from one.
        """
        sizes, _ = self._solve(self._left, shape, "left")
        given = dict(self.sizes)
        for group in self._left:
            if len(group) == 2 and (group[0] in given) != (group[1] in given):
                known, other = group if group[0] in given else group[::-1]
                del given[known]
                given[other] = sizes[other]
        return Rearrange(self.pattern, tuple(given.items()))

    def on_leading_dims(self) -> Rearrange | None:
        """The same for any dimensions in place of the last ones, which this leaves alone: ``"a b ... -> (a b) ..."``.

        None if it changes the order of numbers, leaves no dimension alone, or only changes dimensions of length 1.
        """
        left, right, kept = list(self._left), list(self._right), 0
        while left and right and left[-1] == right[-1] and len(left[-1]) == 1:
            left.pop()
            kept += right.pop() is not None
        axes = [axis for group in left for axis in group]
        if not (kept and axes and self.keeps_order) or ELLIPSIS in axes:
            return None
        pattern = " -> ".join(" ".join([*map(_shown, groups), ELLIPSIS]) for groups in (left, right))
        return Rearrange(pattern, tuple((axis, size) for axis, size in self.sizes if axis in axes))

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        sizes, more = self._solve(self._left, before.shape, "left")
        atoms, onto = self._atoms(self._left, more), self._atoms(self._right, more)
        split = before.reshape([sizes[axis] for axis in atoms])
        kept = [axis for axis in onto if axis in atoms]
        moved = split.permute([atoms.index(axis) for axis in kept])
        for place, axis in enumerate(onto):
            if axis not in atoms:
                moved = moved.unsqueeze(place)
        moved = moved.expand([sizes[axis] for axis in onto])
        return moved.reshape(self._shape(self._right, sizes, more))

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        known: dict[str, int] = {}
        if shape is not None:
            known, _ = self._solve(self._left, shape, "left")
        sizes, more = self._solve(self._right, after.shape, "right", known)
        atoms, onto = self._atoms(self._left, more), self._atoms(self._right, more)
        split = after.reshape([sizes[axis] for axis in onto])
        for axis in self._added:
            place = onto.index(axis)
            first = split.narrow(place, 0, 1)
            at.compare(f"repetitions along {axis!r} of {self.pattern!r}", first.expand_as(split), split)
            split = first.squeeze(place)
            onto = [other for other in onto if other != axis]
        moved = split.permute([onto.index(axis) for axis in atoms])
        return moved.reshape(self._shape(self._left, sizes, more))

    def torch_code(self, shape: Sequence[int]) -> str:
        """Return the equivalent torch calls for a tensor of this shape, to be appended to its name: ``.T``.

        Raises :class:`LayoutError` for a shape that does not fit the pattern.
        """
        sizes, more = self._solve(self._left, shape, "left")
        atoms, onto = self._atoms(self._left, more), self._atoms(self._right, more)
        kept = [axis for axis in onto if axis in atoms]
        order = [atoms.index(axis) for axis in kept]
        split, final = [sizes[axis] for axis in atoms], self._shape(self._right, sizes, more)
        code, now = "", list(shape)
        if split != now and (order != sorted(order) or len(onto) > len(atoms)):
            code, now = f".reshape({_listed(split)})", split
        if order != sorted(order):
            code += ".T" if len(order) == 2 and len(now) == 2 else f".permute({_listed(order)})"
            now = [now[place] for place in order]
        for place, axis in enumerate(onto):
            if axis not in atoms:
                code += f".unsqueeze({place})"
                now = [*now[:place], sizes[axis], *now[place:]]
        if len(onto) > len(atoms):
            code += f".expand({_listed(now)})"
        return code if now == final else f"{code}.reshape({_listed(final)})"

    def _atoms(self, groups: Sequence[Group], more: int) -> list[str]:
        return [atom for group in groups for axis in group for atom in _expanded(axis, more)]

    def _shape(self, groups: Sequence[Group], sizes: Mapping[str, int], more: int) -> list[int]:
        shape = []
        for group in groups:
            if group == (ELLIPSIS,):
                shape += [sizes[axis] for axis in _expanded(ELLIPSIS, more)]
            else:
                shape.append(math.prod(sizes[axis] for axis in group))
        return shape

    def _solve(
        self, groups: Sequence[Group], shape: Sequence[int], side: str, known: Mapping[str, int] | None = None
    ) -> tuple[dict[str, int], int]:
        """Return the size of every axis, and the number of dimensions that ``...`` stands for."""
        more = len(shape) - sum(group != (ELLIPSIS,) for group in groups)
        if more < 0 or (more and (ELLIPSIS,) not in groups):
            raise LayoutError(
                f"{self.pattern!r}: its {side} side does not have the {len(shape)} dimensions of {list(shape)}"
            )
        sizes = {**dict(self.sizes), **(known or {})}
        flat: list[Group] = []
        for group in groups:
            flat += [(axis,) for axis in _expanded(ELLIPSIS, more)] if group == (ELLIPSIS,) else [group]
        for dim, (group, extent) in enumerate(zip(flat, shape, strict=True)):
            free = [axis for axis in group if axis not in sizes]
            given = math.prod(sizes[axis] for axis in group if axis in sizes)
            if len(free) > 1:
                raise LayoutError(
                    f"{self.pattern!r}: {extent} elements could be split into {free} in several ways; give all "
                    f"but one of their sizes, or the whole tensor's shape"
                )
            if free and given and extent % given == 0:
                sizes[free[0]] = extent // given
            elif free or given != extent:
                axes = " ".join(f"{axis}={sizes.get(axis, '?')}" for axis in group) or "1"
                raise LayoutError(f"{self.pattern!r}: dimension {dim} of {list(shape)} on the {side} is not ({axes})")
        return sizes, more


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _expanded(axis: str, more: int) -> list[str]:
    return [f"...{number}" for number in range(more)] if axis == ELLIPSIS else [axis]


def _shown(group: Group) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1"
