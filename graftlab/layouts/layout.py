"""A layout: the steps from a whole tensor to one rank's tensor, and from the ranks' tensors back to the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, cast

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.gathering import Gather, Rows
from graftlab.layouts.mesh import Coordinates, Mesh
from graftlab.layouts.rearrange import Rearrange
from graftlab.layouts.shards import MeshStep, OneOf, Replicate, Shard
from graftlab.layouts.steps import Disagreement, Step, StepContext, disagreement


@dataclass(frozen=True)
class Joined:
    """A whole tensor joined from the ranks' tensors.

    ``known`` is None if all elements are known; else it is a mask of the whole tensor's shape, and the other elements
    are meaningless zeros. ``disagreements`` lists copies that should be equal and are not; the whole has the first
    copy.
    """

    whole: Tensor
    known: Tensor | None = None
    disagreements: tuple[Disagreement, ...] = ()


@dataclass(frozen=True)
class Relaid:
    """One rank's tensor, made from the other side's tensors.

    ``known`` is as in :class:`Joined`, with this rank's shape; elsewhere the value is the receiver's own. ``caveats``
    are side effects of a graft of this value.
    """

    value: Tensor
    known: Tensor | None = None
    disagreements: tuple[Disagreement, ...] = ()
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a rank's tensor is made from the whole tensor: ``steps``, in order, on the ranks of ``mesh``.

    Without steps it is the identity. Along mesh dimensions that no step names, ranks have replicas, which are checked
    when they are joined. Parse a layout from text with :func:`graftlab.layouts.parse_layout`. ``names`` is its text if
    that names the dimensions.
    """

    steps: tuple[Step, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)
    names: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        names = self.mesh_names
        for name in names:
            if names.count(name) > 1:
                raise LayoutError(f"{self.text}: two steps use mesh dimension {name!r}")

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The text that :func:`graftlab.layouts.parse_layout` parses; it does not include the mesh."""
        return " | ".join(step.text for step in self.steps) or "same"

    def on_leading_dims(self) -> Layout | None:
        """The layout of tensors with the same leading dimensions and any others, such as the inputs of a module.

        None if a step changes more than the leading dimensions; see :meth:`.Rearrange.on_leading_dims`.
        """
        steps: list[Step] = []
        for step in self.steps:
            leading = step.on_leading_dims() if isinstance(step, Rearrange) else step
            if not isinstance(leading, (Rearrange, Gather, Rows)):
                return None
            steps.append(leading)
        return Layout(tuple(steps)) if self.mesh.size == 1 else None

    @property
    def mesh_names(self) -> list[str]:
        """The mesh dimensions that the steps name, in order."""
        return [cast("MeshStep", step).mesh for step in self.steps if hasattr(step, "join")]

    @property
    def leaves_out(self) -> tuple[str, ...]:
        """The parts of the whole that no rank has; empty if the whole can be joined again."""
        return tuple(lost for step in self.steps if (lost := step.leaves_out) is not None)

    @property
    def lacks(self) -> bool:
        """Whether the result has elements that are not in the whole, such as another batch's padding."""
        return any(isinstance(step, (Gather, Rows)) and step.lacks for step in self.steps)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Side effects of a graft into this layout."""
        return tuple(caveat for step in self.steps if (caveat := step.caveat) is not None)

    def on(self, mesh: Mesh | Mapping[str, int] | int) -> Layout:
        """Return this layout on a mesh: sizes by name, outermost first, or the size of a single dimension."""
        return replace(self, mesh=Mesh.of(mesh, self.mesh_names))

    @property
    def cuts_sequences(self) -> bool:
        """Whether ranks have contiguous pieces of each of several sequences, for which their lengths are needed."""
        return any(self._cuts_sequences(step) for step in self.steps)

    def of_one_sequence(self) -> Layout:
        """Return the layout in which such pieces are of a single sequence."""
        steps = (replace(step, packed=False) if self._cuts_sequences(step) else step for step in self.steps)
        return replace(self, steps=tuple(steps))

    def _cuts_sequences(self, step: Step) -> TypeGuard[Shard]:
        is_cut = isinstance(step, Shard) and step.packed and step.order == "contiguous"
        return is_cut and self.mesh.size_of(cast("Shard", step).mesh) > 1

    def then(self, *steps: Step) -> Layout:
        """Return this layout followed by further steps."""
        return Layout((*self.steps, *steps), self.mesh)

    # ---- from the whole to the ranks ----------------------------------------------------------------------------

    def local(self, whole: Tensor, rank: int = 0, lengths: Sequence[int] | None = None) -> Tensor:
        """Return a rank's part of the whole, which may share its memory.

        ``lengths`` are the lengths of the sequences in the batch, for steps that pack or cut sequences. Raises
        :class:`LayoutError` if the whole does not have the dimensions that a step needs.
        """
        at = StepContext(self.mesh, rank, _tuple(lengths))
        if self.mesh.size > 1 and rank not in self.mesh.ranks:
            self.mesh.coordinate_of(rank, "")
        for step in self.steps:
            whole = step.get(whole, at)
        return whole

    def split(self, whole: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of ``mesh.ranks``."""
        return [self.local(whole, rank, lengths) for rank in self.mesh.ranks]

    # ---- from the ranks to the whole ----------------------------------------------------------------------------

    def join(
        self, locals_: Sequence[Tensor], shape: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Joined:
        """Join the whole tensor from the tensors of all ranks, in the order of ``mesh.ranks``.

        ``shape`` is the whole tensor's, for steps from which it does not follow: merged dimensions, padded shards,
        windows. Raises :class:`LayoutError`, which names the step, if tensors do not have the layout.
        """
        if len(locals_) != self.mesh.size:
            raise LayoutError(
                f"{self.text} is on {self.mesh.size} ranks {dict(self.mesh.sizes)}, not {len(locals_)} tensors"
            )
        notes: list[Disagreement] = []
        given = _tuple(lengths)
        whole = self._join(list(locals_), shape, given, notes)
        if shape is not None and tuple(whole.shape) != tuple(shape):
            raise LayoutError(f"{self.text} gives a whole of shape {list(whole.shape)}, not {list(shape)}")
        known = None
        if self.leaves_out:
            masks = [torch.ones_like(local, dtype=torch.bool) for local in locals_]
            known = self._join(masks, shape, given, [])
        return Joined(whole, known, tuple(notes))

    def _join(
        self,
        locals_: list[Tensor],
        shape: Sequence[int] | None,
        lengths: tuple[int, ...] | None,
        notes: list[Disagreement],
    ) -> Tensor:
        held = dict(zip(self.mesh.coordinates(), locals_, strict=True))
        ranks = dict(zip(self.mesh.coordinates(), self.mesh.ranks, strict=True))
        shapes = self._shapes(shape, lengths)
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            mesh = getattr(step, "mesh", None)
            if mesh in self.mesh.names:
                held = self._join_along(cast("MeshStep", step), held, ranks, shapes, number, lengths, notes)
            else:
                for coordinates, tensor in held.items():
                    at = StepContext(self.mesh, ranks[coordinates], lengths, notes)
                    held[coordinates] = step.put(tensor, at, shapes[number].get(ranks[coordinates]))
        for name in self.mesh.names:
            if name not in self.mesh_names:
                held = self._join_along(Replicate(name), held, ranks, shapes, 0, lengths, notes)
        return next(iter(held.values()))

    def _join_along(
        self,
        step: MeshStep,
        held: dict[Coordinates, Tensor],
        ranks: Mapping[Coordinates, int],
        shapes: Sequence[Mapping[int, Sequence[int]]],
        number: int,
        lengths: tuple[int, ...] | None,
        notes: list[Disagreement],
    ) -> dict[Coordinates, Tensor]:
        """Join the tensors along one mesh dimension, at its first coordinate."""
        dim = self.mesh.names.index(step.mesh)
        groups: dict[Coordinates, list[Tensor]] = {}
        for coordinates in sorted(held):
            groups.setdefault((*coordinates[:dim], 0, *coordinates[dim + 1 :]), []).append(held[coordinates])
        joined = {}
        for first, tensors in groups.items():
            at = StepContext(self.mesh, ranks[first], lengths, notes)
            joined[first] = step.join(tensors, at, shapes[number].get(ranks[first]))
        return joined

    def _shapes(self, shape: Sequence[int] | None, lengths: tuple[int, ...] | None) -> list[dict[int, Sequence[int]]]:
        """Return the shape before each step on each rank, if the whole tensor's is known."""
        if shape is None:
            return [{} for _ in range(len(self.steps) + 1)]
        shapes: list[dict[int, Sequence[int]]] = [{} for _ in range(len(self.steps) + 1)]
        for rank in self.mesh.ranks:
            tensor = torch.empty(tuple(shape), device="meta")
            at = StepContext(self.mesh, rank, lengths)
            for number, step in enumerate(self.steps):
                shapes[number][rank] = tuple(tensor.shape)
                tensor = step.get(tensor, at)
        return shapes


def _tuple(lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if lengths is None else tuple(int(length) for length in lengths)


def join_parts(
    parts: Sequence[tuple[Layout, Sequence[Tensor]]],
    shape: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
) -> Joined:
    """Join one whole from several taps of one side that are parts of it, such as q, k and v of a fused qkv.

    Each part is a layout with the tensors of all ranks of its mesh. Overlapping parts are compared, and the first takes
    precedence. Raises :class:`LayoutError` if the parts are not of one whole.
    """
    if not parts:
        raise LayoutError("no part was given, so there is nothing to join")
    first, *others = (layout.join(locals_, shape, lengths) for layout, locals_ in parts)
    whole, known, notes = first.whole, first.known, list(first.disagreements)
    for (layout, _), other in zip(parts[1:], others, strict=True):
        if other.whole.shape != whole.shape:
            raise LayoutError(
                f"{layout} makes a whole of shape {list(other.whole.shape)}, but the previous part one "
                f"of {list(whole.shape)}"
            )
        notes += other.disagreements
        theirs = torch.ones_like(whole, dtype=torch.bool) if other.known is None else other.known
        mine = torch.ones_like(theirs) if known is None else known
        both = mine & theirs
        if both.any():
            found = disagreement(
                f"the common elements of {parts[0][0]} and {layout}", whole[both], other.whole[both].to(whole.dtype)
            )
            notes += [found] if found else []
        whole = torch.where(mine, whole, other.whole.to(whole.dtype))
        merged = mine | theirs
        known = None if bool(merged.all()) else merged
    return Joined(whole, known, tuple(notes))


def part_of(joined: Joined, layout: Layout, rank: int = 0, lengths: Sequence[int] | None = None) -> Joined:
    """Return a rank's part of a whole that was joined, with the mask of what is known of that part."""
    known = joined.known
    if known is None and layout.lacks:
        known = torch.ones_like(joined.whole, dtype=torch.bool)
    if known is not None:
        known = layout.local(known, rank, lengths)
        known = None if bool(known.all()) else known
    return replace(joined, whole=layout.local(joined.whole, rank, lengths), known=known)


def relayout(
    parts: Sequence[tuple[Layout, Sequence[Tensor]]],
    layout: Layout,
    rank: int = 0,
    *,
    shape: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    own: Tensor | None = None,
) -> Relaid:
    """Make ``rank``'s tensor in ``layout`` from the other side's tensors in theirs.

    ``parts`` are as in :func:`join_parts`, usually one. ``own`` is the receiver's own tensor, which provides elements
    that the parts lack. Raises :class:`LayoutError` if the parts do not have their layouts, if the result would not
    have ``own``'s shape, and if elements are missing without ``own``.
    """
    joined = join_parts(parts, shape, lengths)
    if own is not None and not own.numel() and any(isinstance(step, OneOf) for step in layout.steps):
        return Relaid(own, None, joined.disagreements, layout.caveats)
    part = part_of(joined, layout, rank, lengths)
    value, known = part.whole, part.known
    if own is not None and own.shape != value.shape:
        texts = ", ".join(str(part) for part, _ in parts)
        raise LayoutError(
            f"from {texts} to {layout}: rank {rank} would have shape {list(value.shape)}, but it has {list(own.shape)}"
        )
    if known is not None:
        if own is None:
            left = "; ".join(lost for part, _ in parts for lost in part.leaves_out) or "rows that only this side has"
            raise LayoutError(f"the parts lack elements that {layout} needs: {left}")
        value = torch.where(known, value.to(own.dtype), own)
    return Relaid(value, known, joined.disagreements, layout.caveats)
