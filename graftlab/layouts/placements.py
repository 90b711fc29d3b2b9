"""The layout of a DTensor, read from its placements and its mesh."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.layout import Layout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.shards import Partial, Replicate, Shard
from graftlab.layouts.steps import Step


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
