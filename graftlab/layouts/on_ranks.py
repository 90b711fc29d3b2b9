"""The layout of one rank's tensor: read from a DTensor, or declared at its tap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.dims import REPEATED
from graftlab.layouts.known_mesh import VARIABLE, mesh_on
from graftlab.layouts.layout import Layout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.shards import OneOf, Partial, Replicate, Shard
from graftlab.layouts.steps import Step
from graftlab.layouts.text import parse_layout


@dataclass(frozen=True)
class RankLayout:
    """How a rank's tensor is made from the whole tensor.

    ``layout`` is on the side's mesh. ``shape`` is the whole tensor's, if known. ``names`` is the annotation of the
    dimensions, if the layout was given in that form; two annotations determine the conversion between the sides.
    ``unknown`` is the reason why an annotation cannot be used on these ranks; ``layout`` then has no steps.
    """

    layout: Layout
    shape: tuple[int, ...] | None = None
    names: str | None = None
    unknown: str | None = None

    @property
    def is_partial(self) -> bool:
        """Whether the rank's tensor is a partial sum."""
        sizes = dict(self.layout.mesh.sizes)
        return any(isinstance(step, Partial) and sizes.get(step.mesh, 1) > 1 for step in self.layout.steps)

    def reduced(self) -> RankLayout:
        """Return the layout after the partial sums are added up."""
        steps = [Replicate(step.mesh) if isinstance(step, Partial) else step for step in self.layout.steps]
        return RankLayout(Layout(tuple(steps), self.layout.mesh), self.shape)


def rank_layout(shown: Any, given: Any, world_size: int, rank: int = 0) -> RankLayout | None:
    """Return the layout of a tap's value on a rank, from a DTensor or as declared; None if only its shape is known.

    Raises :class:`LayoutError` for a layout that cannot be read, or whose steps do not determine the split over these
    ranks.
    """
    read = layout_of_dtensor(shown) if isinstance(shown, torch.Tensor) else None
    if read is not None:
        if given is not None:
            raise LayoutError(f"layout={given!r} is for plain tensors; the layout of this DTensor is {read}")
        return RankLayout(read, tuple(shown.shape))
    if given is None:
        return None
    layout = given if isinstance(given, Layout) else parse_layout(given)
    try:
        return RankLayout(_with_mesh(layout, rank, world_size), None, layout.names)
    except LayoutError as error:
        if layout.names is None:
            raise
        # An engine's annotation must not make taps fail that its shapes alone would compare.
        return RankLayout(Layout(), None, layout.names, str(error))


def _with_mesh(layout: Layout, rank: int, ranks: int) -> Layout:
    """Put a layout on this side's ranks, unless it already has a mesh."""
    if layout.mesh.sizes:
        return layout
    # Groups in which one rank has everything, such as the data parallel group, do not use up ranks; and a forward pass
    # that checkpointing repeats is a separate tap.
    groups = {step.mesh for step in layout.steps if isinstance(step, OneOf)}
    names = [name for name in layout.mesh_names if name not in groups and name != REPEATED]
    if ranks == 1:
        return layout.on(Mesh(tuple((name, 1) for name in names) or (("rank", 1),)))
    known = mesh_on(names, rank, ranks) if names else None
    if known is not None:
        return layout.on(known if known.sizes else Mesh((("rank", ranks),)))
    if len(names) <= 1:
        return layout.on(Mesh(((names[0] if names else "rank", ranks),)))
    sizes = ",".join(f"{name}={ranks if place == 0 else 1}" for place, name in enumerate(names))
    raise LayoutError(
        f"{layout.names or layout}: it is unknown how {ranks} ranks are split over {names}; give the sizes, outermost "
        f"first, as in {VARIABLE}={sizes} or gl.attach(mesh=...), or at the tap "
        f"layout=graftlab.layouts.parse_layout(text, mesh={{{names[0]!r}: {ranks}, {names[1]!r}: 1}})"
    )


# ---- DTensors -------------------------------------------------------------------------------------------------------


def layout_of_dtensor(tensor: Tensor) -> Layout | None:
    """Return how a DTensor's ``to_local()`` is made from the whole, on its mesh; None for any other tensor.

    The mesh's dimensions have their given names, or ``mesh0``, ``mesh1``; its ranks are those of the default process
    group. ``tensor.shape`` is the whole tensor's. Raises :class:`LayoutError` for an unknown placement.
    """
    # A check of attributes, so that torch.distributed is not imported where it is not used.
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
    # By name, because torch's strided placement, which FSDP over tensor parallelism makes, is private.
    kind = type(placement).__name__
    if kind == "_StridedShard":
        # The later dimensions cut first, so each of those pieces is cut separately.
        return Shard(placement.dim, name, blocks=(1,) * placement.split_factor)
    if kind == "Shard":
        return Shard(placement.dim, name)
    if kind == "Replicate":
        return Replicate(name)
    if kind == "Partial":
        return Partial(name, placement.reduce_op)
    raise LayoutError(
        f"{placement} (of {placements}) is a placement that graftlab does not know; declare layout=... at the tap"
    )
