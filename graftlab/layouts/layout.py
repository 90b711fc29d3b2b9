"""A layout: the steps from a whole tensor to what one rank holds, and from what the ranks hold to the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.mesh import Coordinates, Mesh
from graftlab.layouts.shards import MeshStep, OneOf, Replicate
from graftlab.layouts.steps import Disagreement, Step, StepContext, disagreement


@dataclass(frozen=True)
class Joined:
    """A whole tensor made from what ranks hold.

    ``known`` is None where all of it is; else it is a mask of the whole tensor's shape, and the rest is zeros that mean
    nothing. ``disagreements`` are copies that should have been equal and are not; the whole has the first of them.
    """

    whole: Tensor
    known: Tensor | None = None
    disagreements: tuple[Disagreement, ...] = ()


@dataclass(frozen=True)
class Relaid:
    """What a rank should hold, made from what the other side's ranks hold.

    ``known`` is as in :class:`Joined`, of this rank's shape: elsewhere the value is the receiver's own. ``caveats`` are
    what a graft of it does beyond putting the value there.
    """

    value: Tensor
    known: Tensor | None = None
    disagreements: tuple[Disagreement, ...] = ()
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How a rank's tensor is made from the whole tensor: ``steps``, in order, on the ranks of ``mesh``.

    Without steps it is the identity. Dimensions of the mesh that no step names hold replicas, which are checked when
    they are joined. Read one from text with :func:`graftlab.layouts.parse_layout`.
    """

    steps: tuple[Step, ...] = ()
    mesh: Mesh = field(default_factory=Mesh)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        names = self.mesh_names
        for name in names:
            if names.count(name) > 1:
                raise LayoutError(f"{self.text}: mesh dimension {name!r} is used up by its first step")

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """What :func:`graftlab.layouts.parse_layout` reads again; the mesh is not part of it."""
        return " | ".join(step.text for step in self.steps) or "same"

    @property
    def mesh_names(self) -> list[str]:
        """The mesh's dimensions that the steps name, in their order."""
        return [cast("MeshStep", step).mesh for step in self.steps if hasattr(step, "join")]

    @property
    def leaves_out(self) -> tuple[str, ...]:
        """What of the whole no rank holds; empty where the whole can be made again."""
        return tuple(lost for step in self.steps if (lost := step.leaves_out) is not None)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a graft into this layout does that the value does not show."""
        return tuple(caveat for step in self.steps if (caveat := step.caveat) is not None)

    def on(self, mesh: Mesh | Mapping[str, int] | int) -> Layout:
        """This layout on a mesh: sizes by name, outermost first; a bare number where one dimension is meant."""
        return replace(self, mesh=Mesh.of(mesh, self.mesh_names))

    def then(self, *steps: Step) -> Layout:
        """This layout with further steps after it."""
        return replace(self, steps=(*self.steps, *steps))

    # ---- from the whole to the ranks ----------------------------------------------------------------------------

    def local(self, whole: Tensor, rank: int = 0, lengths: Sequence[int] | None = None) -> Tensor:
        """What a rank holds of the whole. It may share memory with it.

        ``lengths`` are those of the sequences in the batch, for steps that pack or cut sequences. Raises
        :class:`LayoutError` where the whole does not have the dimensions that a step needs.
        """
        at = StepContext(self.mesh, rank, _tuple(lengths))
        if self.mesh.size > 1 and rank not in self.mesh.ranks:
            self.mesh.coordinate_of(rank, "")
        for step in self.steps:
            whole = step.get(whole, at)
        return whole

    def split(self, whole: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """What every rank of the mesh holds, in the order of ``mesh.ranks``."""
        return [self.local(whole, rank, lengths) for rank in self.mesh.ranks]

    # ---- from the ranks to the whole ----------------------------------------------------------------------------

    def join(
        self, locals_: Sequence[Tensor], shape: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Joined:
        """The whole tensor, from what every rank of the mesh holds, in the order of ``mesh.ranks``.

        ``shape`` is the whole tensor's, for steps that do not tell it: merged dimensions, padded shards, windows.
        Raises :class:`LayoutError` where tensors do not have the layout, with the step that does not fit.
        """
        if len(locals_) != self.mesh.size:
            raise LayoutError(
                f"{self.text} is on {self.mesh.size} ranks {dict(self.mesh.sizes)}, and {len(locals_)} tensors came"
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
        """One mesh dimension less: what stood along it is joined at its first place."""
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
        """The shape before each step on each rank, where the whole tensor's is known."""
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
    """One whole from several taps of one side, each of which is a part of it: q, k and v of a fused qkv.

    Each part is its layout and what every rank of its mesh holds. Where parts overlap they are compared, and the first
    wins. Raises :class:`LayoutError` where they do not belong to one whole.
    """
    if not parts:
        raise LayoutError("no part was given, so there is no whole")
    first, *others = (layout.join(locals_, shape, lengths) for layout, locals_ in parts)
    whole, known, notes = first.whole, first.known, list(first.disagreements)
    for (layout, _), other in zip(parts[1:], others, strict=True):
        if other.whole.shape != whole.shape:
            raise LayoutError(
                f"{layout} makes a whole of shape {list(other.whole.shape)}, the part before one of {list(whole.shape)}"
            )
        notes += other.disagreements
        theirs = torch.ones_like(whole, dtype=torch.bool) if other.known is None else other.known
        mine = torch.ones_like(theirs) if known is None else known
        both = mine & theirs
        if both.any():
            found = disagreement(
                f"what {parts[0][0]} and {layout} share", whole[both], other.whole[both].to(whole.dtype)
            )
            notes += [found] if found else []
        whole = torch.where(mine, whole, other.whole.to(whole.dtype))
        merged = mine | theirs
        known = None if bool(merged.all()) else merged
    return Joined(whole, known, tuple(notes))


def relayout(
    parts: Sequence[tuple[Layout, Sequence[Tensor]]],
    layout: Layout,
    rank: int = 0,
    *,
    shape: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    own: Tensor | None = None,
) -> Relaid:
    """What ``rank`` should hold in ``layout``, from what the other side's ranks hold in theirs.

    ``parts`` are as in :func:`join_parts`: mostly one. ``own`` is the receiver's own tensor; where the parts do not say
    everything, the rest is taken from it. Raises :class:`LayoutError` where the parts are not of their layouts, where
    the result would not have ``own``'s shape, and where something is left out and there is no ``own``.
    """
    joined = join_parts(parts, shape, lengths)
    if own is not None and not own.numel() and any(isinstance(step, OneOf) for step in layout.steps):
        return Relaid(own, None, joined.disagreements, layout.caveats)
    value = layout.local(joined.whole, rank, lengths)
    known = None if joined.known is None else layout.local(joined.known, rank, lengths)
    if known is not None and bool(known.all()):
        known = None
    if own is not None and own.shape != value.shape:
        texts = ", ".join(str(part) for part, _ in parts)
        raise LayoutError(
            f"from {texts} to {layout}: rank {rank} would hold {list(value.shape)}, and it holds {list(own.shape)}"
        )
    if known is not None:
        if own is None:
            raise LayoutError(f"the parts leave out something of what {layout} needs: {'; '.join(_left_out(parts))}")
        value = torch.where(known, value.to(own.dtype), own)
    return Relaid(value, known, joined.disagreements, layout.caveats)


def _left_out(parts: Sequence[tuple[Layout, Sequence[Tensor]]]) -> list[str]:
    return [lost for layout, _ in parts for lost in layout.leaves_out]
