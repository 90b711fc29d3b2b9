"""A DTensor's layout from its placements: a layout joins what torch has split over real ranks, and the reverse."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from kit.groups import run_ranks
from kit.refusals import exactly
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graftlab import layouts
from graftlab.errors import LayoutError
from graftlab.layouts import Layout, Mesh, layout_of_dtensor, relayout
from graftlab.layouts.known_mesh import mesh_on
from graftlab.layouts.on_ranks import _step, rank_layout

WORLD_SIZE = 4
SHAPE = (5, 7, 6)

# Uneven everywhere but in the last dimension; on a mesh of 2 x 2, and on one of 4.
GRID = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (Shard(2), Partial()),
    (Partial(), Replicate()),
    (Partial(), Partial()),
]
LINE = [(Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),), (Partial(),)]


def whole() -> torch.Tensor:
    return torch.arange(5 * 7 * 6, dtype=torch.float32).reshape(SHAPE)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)


def run_rank(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4,))
    made: list[tuple[str, DTensor]] = []
    for mesh, placements in [*((grid, each) for each in GRID), *((line, each) for each in LINE)]:
        if any(isinstance(placement, Partial) for placement in placements):
            # Nothing is sent: each rank says what it holds, and the sums add up to a whole that full_tensor tells.
            sharded = [Shard(2) if isinstance(each, Shard) else Replicate() for each in placements]
            local = distribute_tensor(whole(), mesh, sharded).to_local()
            made.append((str(placements), DTensor.from_local(local * (rank + 1), mesh, placements)))
        else:
            made.append((str(placements), distribute_tensor(whole(), mesh, placements)))
    model = MLP()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 1000 * number)
    parallelize_module(model, grid["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    made += [(name, parameter.detach()) for name, parameter in model.named_parameters()]  # type: ignore[misc]
    saved = []
    for name, tensor in made:
        layout = layout_of_dtensor(tensor)
        assert layout is not None
        full = tensor.full_tensor()
        saved.append((name, layout, tensor.to_local().clone(), tuple(tensor.shape), full))
    torch.save(saved, f"{folder}/{rank}.pt")
    of_plain = rank_layout(torch.ones(1), "s[dp] h[tp]", WORLD_SIZE, rank)
    torch.save(
        (of_plain, mesh_on(("tp",), rank, WORLD_SIZE), mesh_on(("cp",), rank, WORLD_SIZE)), f"{folder}/mesh{rank}"
    )
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[Any, ...]]]:
    """What each rank holds of each tensor: its name, layout, local tensor, whole shape and whole."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, folder, WORLD_SIZE)
    per_rank = [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]
    return [list(tensors) for tensors in zip(*per_rank, strict=True)]


@pytest.mark.ranks
def test_joined_shards_equal_torchs_full_tensor(held: list[list[tuple[Any, ...]]]) -> None:
    assert len(held) == len(GRID) + len(LINE) + 4
    for ranks in held:
        name, layout, _, shape, full = ranks[0]
        assert all(rank[1] == layout for rank in ranks), name
        joined = layout.join([ranks[number][2] for number in layout.mesh.ranks], shape)
        assert torch.equal(joined.whole, full), (name, layout)
        if "Partial" not in name:
            assert joined.disagreements == (), name


@pytest.mark.ranks
def test_a_whole_is_cut_for_a_dtensor_as_torch_cuts_it(held: list[list[tuple[Any, ...]]]) -> None:
    for ranks in held:
        name, layout, _, shape, full = ranks[0]
        for rank in range(WORLD_SIZE):
            relaid = relayout([(Layout(), [full])], layout, rank, shape=shape, own=ranks[rank][2])
            if "Partial" in name:
                assert any("whole value of a partial sum" in caveat for caveat in relaid.caveats)
            else:
                assert torch.equal(relaid.value, ranks[rank][2]), (name, layout, rank)
        grafted = [relayout([(Layout(), [full])], layout, rank).value for rank in layout.mesh.ranks]
        assert torch.equal(layout.join(grafted, shape).whole, full), name


@pytest.mark.ranks
def test_relayout_between_different_meshes(held: list[list[tuple[Any, ...]]]) -> None:
    by_name = {ranks[0][0]: ranks for ranks in held}
    source, target = by_name[str((Shard(0), Shard(1)))], by_name[str((Shard(1),))]
    layout = source[0][1]
    for rank in range(WORLD_SIZE):
        relaid = relayout([(layout, [each[2] for each in source])], target[rank][1], rank, own=target[rank][2])
        assert torch.equal(relaid.value, target[rank][2])


@pytest.mark.ranks
def test_the_names_and_ranks_of_the_mesh_are_those_of_the_device_mesh(held: list[list[tuple[Any, ...]]]) -> None:
    layouts = {ranks[0][0]: ranks[0][1] for ranks in held}
    assert layouts[str((Shard(0), Replicate()))].mesh == Mesh((("dp", 2), ("tp", 2)))
    assert layouts[str((Shard(2),))].mesh == Mesh((("mesh0", 4),))
    assert layouts["up.weight"].text == "shard(dim=0, mesh='dp', blocks=[1, 1]) | shard(dim=0, mesh='tp')"


@pytest.mark.ranks
def test_a_plain_tensors_named_axes_are_those_of_the_device_mesh(
    held: list[list[tuple[Any, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "ranks0"
    for rank in range(WORLD_SIZE):
        both, tp, unknown = torch.load(folder / f"mesh{rank}", weights_only=False)
        assert (both.unknown, both.layout.mesh) == (None, Mesh((("dp", 2), ("tp", 2))))
        first = rank - rank % 2
        assert tp == Mesh((("tp", 2),), (first, first + 1))
        assert unknown is None


def test_how_the_ranks_values_become_one_is_the_placements() -> None:
    for op in ("sum", "avg", "max", "min"):
        assert Layout((_step(Partial(op), "tp", ()),)).text == Layout((layouts.Partial("tp", op),)).text


def test_a_dim_that_later_axes_of_the_mesh_cut_first_is_cut_in_blocks() -> None:
    later = type("_StridedShard", (), {"dim": 1, "split_factor": 2})()
    grid = SimpleNamespace(mesh_dim_names=None, mesh=torch.tensor([[0, 2], [1, 3]]))
    found = layout_of_dtensor(cast("Any", SimpleNamespace(placements=[later, Shard(1)], device_mesh=grid)))
    assert found is not None
    assert found.steps == (layouts.Shard(1, "mesh0", blocks=(1, 1)), layouts.Shard(1, "mesh1"))
    assert found.mesh == Mesh((("mesh0", 2), ("mesh1", 2)), (0, 2, 1, 3))


def test_a_plain_tensor_has_no_placements_and_an_unknown_placement_is_not_guessed() -> None:
    assert layout_of_dtensor(torch.zeros(2)) is None
    with pytest.raises(
        LayoutError,
        match=exactly("Diagonal() (of ()) is a placement that graftlab does not know; declare layout=... at the tap"),
    ):
        _step("Diagonal()", "tp", ())
