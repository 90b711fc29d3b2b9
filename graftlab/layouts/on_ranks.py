"""The layout of what one rank holds: read from a DTensor, or from what its tap was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.layout import Layout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.shards import OneOf, Partial, Replicate, Shard
from graftlab.layouts.steps import Step
from graftlab.layouts.text import names_dimensions, parse_layout


@dataclass(frozen=True)
class RankLayout:
    """How what a rank holds is made from the whole tensor.

    ``layout`` is on the side's mesh. ``shape`` is the whole tensor's, where it is known. ``names`` is an annotation of
    the dimensions, where that is what was given: what is between two sides follows from both of theirs.
    """

    layout: Layout
    shape: tuple[int, ...] | None = None
    names: str | None = None

    @property
    def is_partial(self) -> bool:
        """Whether what the rank holds is one of several summands."""
        sizes = dict(self.layout.mesh.sizes)
        return any(isinstance(step, Partial) and sizes.get(step.mesh, 1) > 1 for step in self.layout.steps)

    def reduced(self) -> RankLayout:
        """The layout of what is left when the partial sums are taken."""
        steps = [Replicate(step.mesh) if isinstance(step, Partial) else step for step in self.layout.steps]
        return RankLayout(Layout(tuple(steps), self.layout.mesh), self.shape)


def rank_layout(shown: Any, given: Any, world_size: int) -> RankLayout | None:
    """The layout that a tap's value has or was given; None where only its shape tells.

    Raises :class:`LayoutError` for one that cannot be read, or does not say how it lies on these ranks.
    """
    read = layout_of_dtensor(shown) if isinstance(shown, torch.Tensor) else None
    if read is not None:
        if given is not None:
            raise LayoutError(f"layout={given!r} is for plain tensors: a DTensor says itself that it is {read}")
        return RankLayout(read, tuple(shown.shape))
    if given is None:
        return None
    if isinstance(given, Layout):
        return RankLayout(_on(given, world_size))
    names = given if isinstance(given, str) and names_dimensions(given) else None
    return RankLayout(_on(parse_layout(given), world_size), None, names)


def _on(layout: Layout, ranks: int) -> Layout:
    """The layout on this side's ranks, unless it says on which."""
    if layout.mesh.sizes:
        return layout
    # Those of the notation that hold all there is, such as the data parallel group, take no rank of their own.
    names = [name for name in layout.mesh_names if name not in _groups(layout)]
    if len(names) <= 1:
        return layout.on(Mesh(((names[0] if names else "rank", ranks),)))
    if ranks == 1:
        return layout.on(Mesh(tuple((name, 1) for name in names)))
    raise LayoutError(
        f"{layout}: {ranks} ranks do not say how they are split over {names}; give the sizes too, as in "
        f"layout=graftlab.layouts.parse_layout(text, mesh={{{names[0]!r}: {ranks}, {names[1]!r}: 1}})"
    )


def _groups(layout: Layout) -> set[str]:
    return {step.mesh for step in layout.steps if isinstance(step, OneOf)}


# ---- DTensors -------------------------------------------------------------------------------------------------------


def layout_of_dtensor(tensor: Tensor) -> Layout | None:
    """How a DTensor's ``to_local()`` is made from the whole, on its mesh; None for any other tensor.

    The mesh's dimensions have the names it was given, or ``mesh0``, ``mesh1``; its ranks are those of the default
    process group. ``tensor.shape`` is the whole tensor's. Raises :class:`LayoutError` for a placement that is not
    known, which is never guessed at.
    """
    # Asked of the object, so that nothing of torch.distributed is imported where it is not used.
    if not hasattr(tensor, "placements") or not hasattr(tensor, "device_mesh"):
        return None
    given: Any = tensor
    device_mesh, placements = given.device_mesh, tuple(given.placements)
    names = device_mesh.mesh_dim_names or tuple(f"mesh{number}" for number in range(len(placements)))
    grid = device_mesh.mesh
    mesh = Mesh(tuple(zip(names, grid.shape, strict=True)), tuple(grid.flatten().tolist()))
    steps = [_step(placement, name, placements) for placement, name in zip(placements, names, strict=True)]
    return Layout(tuple(steps), mesh)


def _step(placement: Any, name: str, placements: tuple[Any, ...]) -> Step:
    # By name: torch keeps the strided one private, and it is what FSDP over tensor parallelism makes.
    kind = type(placement).__name__
    if kind == "_StridedShard":
        # First cut by the dimensions after it, so each of those pieces is cut by itself.
        return Shard(placement.dim, name, blocks=(1,) * placement.split_factor)
    if kind == "Shard":
        return Shard(placement.dim, name)
    if kind == "Replicate":
        return Replicate(name)
    if kind == "Partial":
        return Partial(name, placement.reduce_op)
    raise LayoutError(
        f"{placement} (of {placements}) is a placement that graftlab does not know; say layout=... yourself"
    )
