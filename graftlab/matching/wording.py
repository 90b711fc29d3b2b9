"""Expresses strides as a layout: rearranged dimensions, parts, windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from graftlab.layouts import Layout, Part, Rearrange, Step, Strided, Window
from graftlab.matching.strides import Strides

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class _Atom:
    """A digit of the whole's flat index. The tensor has ``length`` of its ``size`` values, from ``start`` on."""

    size: int
    stride: int
    start: int
    length: int
    digit: int | None  # the tensor's digit; None for a fixed one


@lru_cache(maxsize=1024)
def layout_of(found: Strides, whole: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
    """The layout that takes a tensor of ``shape`` out of a whole, in einops notation if possible."""
    layout = _in_words(_cut(_cut_at_own(found, shape), whole), whole, shape)
    if layout is not None:
        return layout
    return Layout((Strided(shape, found.radices, found.strides, found.offset),))


def _cut_at_own(found: Strides, shape: Sequence[int]) -> Strides:
    """The same strides, with digits split at the borders of the tensor's own dimensions."""
    borders = sorted({math.prod(shape[place:]) for place in range(1, len(shape))}, reverse=True)
    radices: list[int] = []
    strides: list[int] = []
    below = math.prod(found.radices)
    for radix, stride in zip(found.radices, found.strides, strict=True):
        above, below = below, below // radix
        for border in borders:
            if below < border < above and border % below == 0 and above % border == 0:
                radices.append(above // border)
                strides.append(stride * (border // below))
                above = border
        radices.append(above // below)
        strides.append(stride)
    return Strides(found.offset, tuple(radices), tuple(strides))


def _cut(found: Strides, whole: Sequence[int]) -> Strides:
    """The same strides, with digits split at the borders of the whole's dimensions."""
    borders = sorted({math.prod(whole[place:]) for place in range(1, len(whole))}, reverse=True)
    radices: list[int] = []
    strides: list[int] = []
    for radix, stride in zip(found.radices, found.strides, strict=True):
        rest = radix
        for border in borders:
            if stride and stride < border < stride * rest and border % stride == 0 and rest % (border // stride) == 0:
                radices.append(rest // (border // stride))
                strides.append(border)
                rest = border // stride
        radices.append(rest)
        strides.append(stride)
    return Strides(found.offset, tuple(radices), tuple(strides))


def _in_words(found: Strides, whole: tuple[int, ...], shape: tuple[int, ...]) -> Layout | None:
    atoms = _atoms(found, whole)
    if atoms is None:
        return None
    # The whole's dimensions as groups of atoms, outermost first. No atom crosses a border between dimensions.
    groups: list[list[_Atom]] = []
    rest = sorted(atoms, key=lambda atom: -atom.stride)
    for extent in whole:
        group: list[_Atom] = []
        while math.prod(atom.size for atom in group) < extent:
            group.append(rest.pop(0))
        groups.append(group)
    steps: list[Step] = []
    for dim, group in enumerate(groups):
        single = _single(group, dim, whole[dim])
        if single is not None:
            steps.append(single)
            continue
        for place, atom in enumerate(group):
            if atom.length == atom.size:
                continue
            outer = math.prod(other.length for other in group[:place])
            steps.append(_part(atom, dim, outer))
    rearranged = _rearranged(groups, found, shape)
    if rearranged is None:
        return None
    return Layout((*steps, *rearranged))


def _atoms(found: Strides, whole: tuple[int, ...]) -> list[_Atom] | None:
    """The whole's flat index in digits, innermost first, split at the digits of both tensors."""
    digits = sorted(
        (stride, number) for number, stride in enumerate(found.strides) if stride and found.radices[number] > 1
    )
    size = math.prod(whole)
    borders = [math.prod(whole[place:]) for place in range(len(whole))]
    atoms: list[_Atom] = []
    expected, offset = 1, found.offset

    def fixed_up_to(stride: int) -> bool:
        """Add digits up to a stride that are fixed in the tensor, split at the whole's dimensions."""
        nonlocal expected
        for border in sorted({border for border in borders if expected < border < stride} | {stride}):
            if border == expected:
                continue
            if border % expected:
                return False
            count = border // expected
            atoms.append(_Atom(count, expected, offset // expected % count, 1, None))
            expected = border
        return True

    for place, (stride, number) in enumerate(digits):
        if stride < expected or not fixed_up_to(stride):
            return None
        radix = found.radices[number]
        following = digits[place + 1][0] if place + 1 < len(digits) else size
        border = min([border for border in borders if border > stride] + [size])
        room = min(following, border) if following % stride == 0 else border
        if stride * radix > border:
            return None  # crosses a border of the whole's dimensions
        start = offset // stride % (room // stride)
        if room % (stride * radix) == 0 and start % radix == 0:
            atoms.append(_Atom(radix, stride, 0, radix, number))
            expected = stride * radix
        elif room % stride == 0 and start + radix <= room // stride:
            atoms.append(_Atom(room // stride, stride, start, radix, number))
            expected = room
        else:
            return None
    if not fixed_up_to(size):
        return None
    covered = sum(atom.start * atom.stride for atom in atoms)
    return atoms if covered == offset else None


def _single(group: Sequence[_Atom], dim: int, extent: int) -> Window | None:
    """The step that takes one element of a dimension, such as the last token, whatever the dimension's extent."""
    if extent <= 2 or any(atom.length > 1 for atom in group):
        return None
    at = 0
    for atom in group:
        at = at * atom.size + atom.start
    return Window(dim, -1 if at == extent - 1 else at, 1)


def _part(atom: _Atom, dim: int, groups: int) -> Part:
    if atom.size % atom.length == 0 and atom.start % atom.length == 0:
        return Part(atom.start // atom.length, (1,) * (atom.size // atom.length), dim, groups)
    sizes = (atom.start, atom.length, atom.size - atom.start - atom.length)
    unit = math.gcd(*sizes)
    of = tuple(size // unit for size in sizes if size)
    return Part(1 if atom.start else 0, of, dim, groups)


def _rearranged(groups: list[list[_Atom]], found: Strides, shape: tuple[int, ...]) -> list[Step] | None:
    """The steps from the whole's dimensions, after parts are taken, to the tensor's; none if they are equal."""
    letters: dict[int, str] = {}
    left: list[list[int]] = []
    for group in groups:
        left.append([atom.digit for atom in group if atom.digit is not None])
    right: list[list[int]] = []
    digits = list(range(len(found.radices)))
    for extent in shape:
        mine: list[int] = []
        while math.prod(found.radices[digit] for digit in mine) < extent:
            if not digits:
                return None
            mine.append(digits.pop(0))
        if math.prod(found.radices[digit] for digit in mine) != extent:
            return None
        right.append(mine)
    # A digit with a single value is not an axis.
    left = [[digit for digit in group if found.radices[digit] > 1] for group in left]
    right = [[digit for digit in group if found.radices[digit] > 1] for group in right]
    order = [digit for group in left for digit in group]
    added = [digit for group in right for digit in group if digit not in order]
    if left == right and not added:
        return []
    if len(order) + len(added) > len(LETTERS):
        return None
    for number, digit in enumerate(order + added):
        letters[digit] = LETTERS[number]

    def written(group: list[int]) -> str:
        names = [letters[digit] for digit in group]
        return "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"

    sizes = [(letters[digit], found.radices[digit]) for digit in added]
    # The size of one axis of each split dimension follows from the shape.
    needed = [digit for group in left for digit in group[1:]]
    sizes += [(letters[digit], found.radices[digit]) for digit in needed]
    pattern = f"{' '.join(map(written, left))} -> {' '.join(map(written, right))}"
    return [Rearrange(pattern, tuple(sizes))]
