"""The mesh of this side's ranks, if this process knows it: given by the user, or from the engine's groups.

The engines' modules are read only where the job has imported them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from graftlab.errors import LayoutError
from graftlab.layouts.mesh import Mesh

VARIABLE = "GRAFTLAB_MESH"

Groups = Mapping[str, tuple[int, ...]]
"""The ranks of this rank's group along each axis, in their order on the axis. An axis without a group has one rank."""

_given: Mesh | None = None
_found: dict[tuple[int, int], Groups] = {}


def parse_mesh(text: str) -> Mesh:
    """Parse sizes by name, outermost first: ``"cp=2,tp=4"``. Raises :class:`LayoutError`."""
    sizes = []
    for part in text.split(","):
        name, _, size = (each.strip() for each in part.partition("="))
        if not name.isidentifier() or not size.isdecimal():
            raise LayoutError(f"{text!r} is not a mesh; write sizes by name, outermost first, as in cp=2,tp=4")
        sizes.append((name, int(size)))
    return Mesh(tuple(sizes))


def give_mesh(mesh: Any) -> None:
    """Use this mesh for layouts without one; None forgets it.

    It is a :class:`Mesh`, sizes by name with the outermost first, such text as ``"cp=2,tp=4"``, or a ``DeviceMesh``
    with names. Raises :class:`LayoutError` for anything else.
    """
    global _given
    if mesh is None or isinstance(mesh, Mesh):
        given = mesh
    elif isinstance(mesh, str):
        given = parse_mesh(mesh)
    elif isinstance(mesh, Mapping):
        given = Mesh.of(mesh)
    elif getattr(mesh, "mesh_dim_names", None):
        grid = mesh.mesh
        given = Mesh(tuple(zip(mesh.mesh_dim_names, grid.shape, strict=True)), tuple(grid.flatten().tolist()))
    else:
        raise LayoutError(f"mesh={mesh!r}: give sizes by name, as in {{'cp': 2, 'tp': 4}}, or a DeviceMesh with names")
    _given = given
    _found.clear()


def mesh_on(axes: Sequence[str], rank: int, world_size: int) -> Mesh | None:
    """Return the mesh of these axes that contains this rank; None if it is unknown. An axis of size 1 is left out.

    Raises :class:`LayoutError` if the known groups are not a regular grid of this side's ranks.
    """
    groups = _groups(rank, world_size, axes)
    if groups is None:
        return None
    wide = {axis: groups[axis] for axis in axes if len(groups.get(axis, ())) > 1}
    if not wide:
        return Mesh()
    # In a regular grid the other groups along an axis are this one, shifted.
    ranks = tuple(rank + sum(each - rank for each in place) for place in product(*wide.values()))
    if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(world_size)):
        raise LayoutError(
            f"the groups of rank {rank} along {dict(wide)} are not a grid of this side's {world_size} ranks"
        )
    return Mesh(tuple((axis, len(group)) for axis, group in wide.items()), ranks)


def _groups(rank: int, world_size: int, axes: Sequence[str]) -> Groups | None:
    known = _found.get((rank, world_size))
    if known is not None:
        return known
    for source in (_of_the_user, _of_megatron, _of_sglang, _of_vllm):
        found = source(rank, world_size)
        if found is not None:
            _found[rank, world_size] = found
            return found
    found = _of_torch(rank)
    # There may be further groups: an axis may have another name in torch.
    return found if all(axis in found for axis in axes) else None


def _of_the_user(rank: int, world_size: int) -> Groups | None:
    mesh = _given
    if mesh is None and (text := os.environ.get(VARIABLE, "").strip()):
        mesh = parse_mesh(text)
    if mesh is None:
        return None
    if mesh.ranks == tuple(range(mesh.size)) and world_size % mesh.size == 0:
        # The mesh is repeated, as for data parallel groups.
        first = rank - rank % mesh.size
        mesh = Mesh(mesh.sizes, tuple(range(first, first + mesh.size)))
    if rank not in mesh.ranks or mesh.size > world_size or world_size % mesh.size:
        raise LayoutError(f"the mesh {dict(mesh.sizes)} has {mesh.size} ranks, and this side {world_size}")
    return _along(mesh, rank)


def _along(mesh: Mesh, rank: int) -> Groups:
    places = dict(zip(mesh.coordinates(), mesh.ranks, strict=True))
    own = mesh.coordinates()[mesh.ranks.index(rank)]
    return {
        axis: tuple(places[(*own[:dim], index, *own[dim + 1 :])] for index in range(size))
        for dim, (axis, size) in enumerate(mesh.sizes)
    }


def _called(module: Any, name: str) -> Any:
    """Return the result of an engine's function; None before the engine has set up its groups, or without it."""
    function = getattr(module, name, None)
    try:
        return None if function is None else function()
    except (AssertionError, AttributeError, RuntimeError, ValueError):
        return None


def _ranks_of(group: Any) -> tuple[int, ...] | None:
    if group is None:
        return None
    if hasattr(group, "ranks"):
        return tuple(group.ranks)
    distributed = sys.modules.get("torch.distributed")
    return None if distributed is None else tuple(distributed.get_process_group_ranks(group))


def _of_functions(module: Any, functions: Mapping[str, str]) -> dict[str, tuple[int, ...]] | None:
    """Return the groups that a module's functions return; None before they are set up."""
    found = {axis: _ranks_of(_called(module, name)) for axis, name in functions.items()}
    known = {axis: ranks for axis, ranks in found.items() if ranks is not None}
    return known or None


_MEGATRON = {
    "tp": "get_tensor_model_parallel_group",
    "cp": "get_context_parallel_group",
    "dp": "get_data_parallel_group",
    "ep": "get_expert_model_parallel_group",
    "etp": "get_expert_tensor_parallel_group",
    "edp": "get_expert_data_parallel_group",
}


def _of_megatron(rank: int, world_size: int) -> Groups | None:
    found = _of_functions(sys.modules.get("megatron.core.parallel_state"), _MEGATRON)
    if found is not None and "tp" in found:
        # Its sequence parallelism uses the group of tensor parallelism.
        arguments = _called(sys.modules.get("megatron.training.global_vars"), "get_args")
        if getattr(arguments, "sequence_parallel", False):
            found["sp"] = found["tp"]
    return found


def _of_sglang(rank: int, world_size: int) -> Groups | None:
    state, attention = (
        sys.modules.get(f"sglang.srt.{name}") for name in ("distributed.parallel_state", "layers.dp_attention")
    )
    found = _of_functions(state, {"tp": "get_tp_group"})
    if found is None:
        return None
    tp = found["tp"]
    # Both divide the ranks of tensor parallelism, the last axis first.
    for module, axes, functions in (
        (attention, ("attn_dp", "cp", "attn_tp"), ("attention_dp_size", "attention_cp_size", "attention_tp_size")),
        (
            state,
            ("moe_dp", "moe_ep", "moe_tp"),
            tuple(f"moe_{kind}_parallel_world_size" for kind in ("data", "expert", "tensor")),
        ),
    ):
        sizes = [_called(module, f"get_{name}") or 1 for name in functions]
        mesh = Mesh(tuple(zip(axes, sizes, strict=True)))
        if mesh.size == len(tp):
            found |= _along(Mesh(mesh.sizes, tp), rank)
    found["ep"] = found.get("moe_ep", (rank,))
    return found


_VLLM = {"tp": "get_tp_group", "dp": "get_dp_group", "ep": "get_ep_group", "cp": "get_pcp_group"}


def _of_vllm(rank: int, world_size: int) -> Groups | None:
    return _of_functions(sys.modules.get("vllm.distributed.parallel_state"), _VLLM)


def _of_torch(rank: int) -> Groups:
    """Return the groups of torch that are named for an axis, as a ``DeviceMesh`` names them (``mesh_tp``)."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    # torch has no public list of a process's groups; without this one, the mesh is unknown.
    members: Mapping[Any, Mapping[int, int]] = getattr(getattr(distributed, "_world", None), "pg_group_ranks", {})
    found: dict[str, tuple[int, ...]] = {}
    twice: set[str] = set()
    for group, places in members.items():
        axis = str(getattr(group, "group_desc", "")).removeprefix("mesh_")
        ranks = tuple(sorted(places, key=places.__getitem__))
        if rank not in ranks:
            continue
        if found.setdefault(axis, ranks) != ranks:
            twice.add(axis)
    return {axis: ranks for axis, ranks in found.items() if axis not in twice}
