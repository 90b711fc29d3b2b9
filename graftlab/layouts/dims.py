"""The notation for dimensions of SGLang's comparator: ``"b s[cp:zigzag] h[tp] d # ep:replicated"``.

It has one name for each dimension of a rank's tensor, in order. Brackets contain the axes over which the dimension is
split, outermost first. The qualifiers of an axis are ``zigzag`` (or ``natural``) order, ``partial`` for a sum that has
not been added up, and ``sharded``, the default. ``(a*b)`` is one dimension fused from two, ``1`` a dimension of size 1.
After ``#`` follow axes over which all ranks have copies (``ep:replicated``), and with ``dp:=moe_dp`` the name of the
data parallel group, in which only one rank has the tensor. ``t`` stands for the tokens of all sequences in one
dimension, ``b`` and ``s`` for batch and sequence in two. Beside ``b``, or where the other side has no ``b``, ``t`` is
the same dimension as ``s``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftlab.errors import LayoutError
from graftlab.layouts.layout import Layout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.rearrange import Rearrange
from graftlab.layouts.shards import OneOf, Order, Partial, Replicate, Shard
from graftlab.layouts.steps import Step

REPEATED = "recompute_pseudo"
"""The axis of a forward pass that activation checkpointing repeats; it has no ranks."""

AXES = (
    *("tp", "cp", "ep", "sp", "dp", "etp", "edp"),
    *("attn_tp", "attn_dp", "moe_ep", "moe_tp", "moe_dp", REPEATED),
)
CONTEXT = "cp"
TOKENS, BATCH, SEQUENCE = "t", "b", "s"

_WORD = re.compile(r"\S+")
# Spaces inside brackets are part of the word: `h[cp, tp]`, `(a * b)`.
_DIM_WORD = re.compile(r"(?:\([^()]*\)|\[[^\[\]]*\]|\S)+")
_DIM = re.compile(r"(?P<one>1)$|(?:(?P<name>[A-Za-z_]\w*)|\((?P<fused>[^()]*)\))(?:\[(?P<modifiers>[^\[\]]*)\])?$")
_NAME = re.compile(r"[A-Za-z_]\w*$")


@dataclass(frozen=True)
class Modifier:
    """An axis over which a dimension is split, and how it is split."""

    axis: str
    zigzag: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Dim:
    """One dimension: the names fused in it (none for size 1), and the axes that split it, outermost first."""

    names: tuple[str, ...]
    modifiers: tuple[Modifier, ...] = ()


@dataclass(frozen=True)
class Dims:
    """A parsed annotation."""

    dims: tuple[Dim, ...]
    replicated: tuple[str, ...] = ()
    dp: str = "dp"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for dim in self.dims for name in dim.names)

    def layout(self) -> Layout:
        """Return the layout that makes a rank's tensor from a whole tensor with these dimensions."""
        steps: list[Step] = []
        for place, dim in enumerate(self.dims):
            for modifier in dim.modifiers:
                # Context parallelism cuts each sequence; other axes cut the tokens of all sequences together.
                packed = TOKENS in dim.names and (modifier.zigzag or modifier.axis == CONTEXT)
                if modifier.partial:
                    steps.append(Partial(modifier.axis))
                else:
                    order: Order = "zigzag" if modifier.zigzag else "contiguous"
                    steps.append(Shard(place, modifier.axis, order=order, packed=packed))
        steps += [Replicate(axis) for axis in self.replicated]
        # Where the data parallel ranks split a dimension, or have copies, none of them has everything alone.
        named = {step.mesh for step in steps if isinstance(step, Shard | Partial | Replicate)}
        return Layout((*steps, *([] if self.dp in named else [OneOf(self.dp)])))

    def sizes(self, shapes: Sequence[Sequence[int]], mesh: Mesh) -> tuple[dict[str, int], dict[str, int]]:
        """Return the sizes of the whole tensor's dimensions, from the shapes of ranks' tensors.

        The second result has the dimensions that ranks split, assuming an even split. Neither has fused dimensions.
        Raises :class:`LayoutError` for tensors with another number of dimensions.
        """
        whole: dict[str, int] = {}
        split: dict[str, int] = {}
        for shape in shapes:
            if len(shape) != len(self.dims):
                raise LayoutError(f"{len(self.dims)} dimensions are named, but a tensor has shape {list(shape)}")
        for place, dim in enumerate(self.dims):
            extents = {shape[place] for shape in shapes}
            if len(dim.names) == 1 and len(extents) == 1:
                ranks = math.prod(mesh.size_of(each.axis) for each in dim.modifiers if not each.partial)
                (split if ranks > 1 else whole)[dim.names[0]] = extents.pop() * ranks
        return whole, split


def layouts_of_pair(
    baseline: str,
    target: str,
    sizes: Mapping[str, int] | None = None,
    *,
    split_sizes: Mapping[str, int] | None = None,
) -> tuple[Layout, Layout]:
    """Return the layouts of two annotated sides; the whole tensor has the dimensions of the baseline's names.

    Dimensions with equal names correspond. ``t`` on one side corresponds to ``b`` and ``s`` on the other, row by row.
    If both sides have ``b``, or neither has, it corresponds to ``s`` alone. ``sizes`` gives sizes of fused dimensions
    that do not follow from shapes; ``split_sizes`` those that are used only where ``sizes`` lacks one. Raises
    :class:`LayoutError` for names that only one side has.
    """
    one, other = parse_dims(baseline), parse_dims(target)
    left, right = [dim.names for dim in one.dims], [dim.names for dim in other.dims]
    known, known_split = dict(sizes or {}), dict(split_sizes or {})
    mine, theirs = set(one.names), set(other.names)
    if TOKENS in mine ^ theirs and SEQUENCE in mine ^ theirs and (BATCH in mine) == (BATCH in theirs):
        for groups in (left, right):
            groups[:] = [tuple(map(_as_sequence, group)) for group in groups]
        known, known_split = (
            {_as_sequence(name): size for name, size in each.items()} for each in (known, known_split)
        )
        mine, theirs = ({name for group in groups for name in group} for groups in (left, right))
    tokens = {TOKENS}, {BATCH, SEQUENCE}
    unlike = mine - theirs, theirs - mine
    if unlike in (tokens, tokens[::-1]):
        flat = left if TOKENS in mine else right
        flat[:] = [tuple(_spread(group)) for group in flat]
    elif mine != theirs:
        alone = sorted(unlike[0] or unlike[1])[0]
        text, side = (baseline, "baseline") if unlike[0] else (target, "target")
        raise LayoutError(f"only the {side} has {alone!r}, so they are not one tensor", text, _place(text, alone))
    rearranged = _rearrangement(left, right, _needed([*left, *right], known, known_split))
    between = [] if rearranged is None else [rearranged]
    return one.layout(), Layout((*between, *other.layout().steps))


def _as_sequence(name: str) -> str:
    return SEQUENCE if name == TOKENS else name


def _needed(
    groups: Sequence[tuple[str, ...]], sizes: Mapping[str, int], split_sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes that are needed to split fused dimensions, from ``split_sizes`` where ``sizes`` lacks one."""
    found = {name: size for group in groups if len(group) > 1 for name in group if (size := sizes.get(name))}
    for group in groups:
        for name in group:
            # The last unknown one follows from the size of the group.
            if name not in found and name in split_sizes and sum(each not in found for each in group) > 1:
                found[name] = split_sizes[name]
    return found


def _spread(group: tuple[str, ...]) -> list[str]:
    return [part for name in group for part in ((BATCH, SEQUENCE) if name == TOKENS else (name,))]


def _rearrangement(
    left: list[tuple[str, ...]], right: list[tuple[str, ...]], sizes: dict[str, int]
) -> Rearrange | None:
    if left == right:
        return None
    pattern = f"{' '.join(map(_written, left))} -> {' '.join(map(_written, right))}"
    return Rearrange(pattern, tuple(sizes.items()))


def _written(group: tuple[str, ...]) -> str:
    return "1" if not group else group[0] if len(group) == 1 else f"({' '.join(group)})"


def parse_dims(text: str) -> Dims:
    """Parse an annotation. Raises :class:`LayoutError` with the position of the fault."""
    shape, hash_, comment = text.partition("#")
    if not shape.strip():
        raise LayoutError("the dimensions are missing", text, 0)
    dims = []
    places: dict[str, int] = {}
    split: dict[str, int] = {}
    for word in _DIM_WORD.finditer(shape):
        dim = _dim(text, word)
        for name in dim.names:
            if name in places:
                raise LayoutError(f"dimension {name!r} is named twice", text, word.start())
            places[name] = word.start()
        for modifier in dim.modifiers:
            if modifier.axis in split:
                raise LayoutError(f"axis {modifier.axis!r} splits two dimensions", text, word.start())
            split[modifier.axis] = word.start()
        dims.append(dim)
    if TOKENS in places and SEQUENCE in places:
        raise LayoutError("'t' and 's' both mean the tokens of sequences; use one of them", text, places[TOKENS])
    replicated, dp = _comment(text, len(shape) + 1, comment, split) if hash_ else ((), "dp")
    return Dims(tuple(dims), replicated, dp)


def _dim(text: str, word: re.Match[str]) -> Dim:
    read = _DIM.match(word.group())
    if read is None:
        raise LayoutError(f"{word.group()!r} is not a dimension: a name, (a*b) or 1, then [axes]", text, word.start())
    if read["one"]:
        return Dim(())
    names: tuple[str, ...] = (read["name"],)
    if read["fused"] is not None:
        parts = read["fused"].split("*")
        place = word.start() + read.start("fused")
        for part in parts:
            if not _NAME.match(part.strip()):
                raise LayoutError(f"{part.strip()!r} is not a name; fused dimensions are written (a*b)", text, place)
            place += len(part) + 1
        names = tuple(part.strip() for part in parts)
        if len(names) < 2:
            raise LayoutError("( ) is for several dimensions fused into one, as in (a*b)", text, word.start())
        if len(set(names)) < len(names):
            raise LayoutError(f"{word.group()!r} names a dimension twice", text, word.start())
    modifiers = []
    if read["modifiers"] is not None:
        place = word.start() + read.start("modifiers")
        for part in read["modifiers"].split(","):
            modifiers.append(_modifier(text, part, place, names))
            place += len(part) + 1
    if len({modifier.axis for modifier in modifiers}) < len(modifiers):
        raise LayoutError(f"{word.group()!r} has an axis twice", text, word.start())
    return Dim(names, tuple(modifiers))


def _modifier(text: str, part: str, place: int, names: tuple[str, ...]) -> Modifier:
    place += len(part) - len(part.lstrip())
    axis, colon, rest = part.strip().partition(":")
    if axis.strip() not in AXES:
        raise LayoutError(f"{axis.strip()!r} is not an axis; the axes are {', '.join(AXES)}", text, place)
    order: set[str] = set()
    partial = False
    inside = place + len(axis) + len(colon)
    for word in rest.split("+") if colon else ():
        qualifier = word.strip()
        if qualifier not in ("sharded", "zigzag", "natural", "partial"):
            raise LayoutError(
                f"{qualifier!r} is unknown; the qualifiers are sharded, zigzag, natural, partial", text, inside
            )
        if (qualifier == "partial" and partial) or (qualifier in ("zigzag", "natural") and order):
            raise LayoutError(f"{part.strip()!r} states twice how the dimension is split", text, inside)
        partial |= qualifier == "partial"
        order |= {qualifier} & {"zigzag", "natural"}
        inside += len(word) + 1
    zigzag = "zigzag" in order
    if zigzag and partial:
        raise LayoutError("a partial sum is not split, so it has no order", text, place)
    if zigzag and not {TOKENS, SEQUENCE} & set(names):
        raise LayoutError("zigzag is an order of sequences, so only for 's' or 't'", text, place)
    return Modifier(axis.strip(), zigzag, partial)


def _comment(text: str, offset: int, comment: str, split: Mapping[str, int]) -> tuple[tuple[str, ...], str]:
    replicated: list[str] = []
    dp: str | None = None
    for word in _WORD.finditer(comment):
        place = offset + word.start()
        group = re.fullmatch(r"dp:=([A-Za-z_]\w*)", word.group())
        axis = re.fullmatch(r"(\w+):replicated", word.group())
        if group:
            if dp is not None:
                raise LayoutError(f"dp is {dp!r} already", text, place)
            dp = group[1]
        elif axis and axis[1] in AXES:
            if axis[1] in split:
                raise LayoutError(f"axis {axis[1]!r} splits a dimension, so it is not replicated", text, place)
            if axis[1] in replicated:
                raise LayoutError(f"axis {axis[1]!r} is replicated already", text, place)
            replicated.append(axis[1])
        elif axis:
            raise LayoutError(f"{axis[1]!r} is not an axis; the axes are {', '.join(AXES)}", text, place)
        else:
            raise LayoutError(f"{word.group()!r} is unknown; write dp:=GROUP or AXIS:replicated", text, place)
    return tuple(replicated), dp or "dp"


def _place(text: str, name: str) -> int:
    found = re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
    return found.start() if found else 0
