"""A rank knows how its side's ranks are arranged: from the user, or from the engine's groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly

from graftlab.base.world import Place
from graftlab.errors import LayoutError
from graftlab.layouts import Mesh, give_mesh, parse_layout
from graftlab.layouts.known_mesh import mesh_on, parse_mesh
from graftlab.layouts.on_ranks import rank_layout
from graftlab.recordings.file_format import StoredLayout
from graftlab.recordings.recorder import TapRecorder

GRID = Mesh((("cp", 2), ("tp", 2)))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    give_mesh(None)
    yield
    give_mesh(None)


def imported(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    made = ModuleType(name)
    vars(made).update({function: lambda result=result: result for function, result in functions.items()})
    monkeypatch.setitem(sys.modules, name, made)


def group(*ranks: int) -> SimpleNamespace:
    return SimpleNamespace(ranks=list(ranks))


def meshes(axes: tuple[str, ...], world_size: int) -> list[Mesh | None]:
    return [mesh_on(axes, rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("error", [AssertionError, AttributeError, RuntimeError, ValueError])
def test_an_engine_that_has_not_set_up_its_groups_has_none(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise error("the groups are not initialized")

    for name in ("megatron.core.parallel_state", "sglang.srt.distributed", "vllm.distributed.parallel_state"):
        made = ModuleType(name)
        made.__getattr__ = lambda function: fails  # type: ignore[method-assign,assignment]
        monkeypatch.setitem(sys.modules, name, made)
    assert mesh_on(("tp", "cp"), 0, 4) is None


def test_sizes_by_name_are_outermost_first_and_repeat_for_data_parallel_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_MESH", " cp=2, tp=2")
    assert meshes(("tp", "cp"), 4) == [Mesh((("tp", 2), ("cp", 2)), (0, 2, 1, 3))] + [
        mesh_on(("tp", "cp"), rank, 4) for rank in range(1, 4)
    ]
    assert [sorted(each.ranks) for each in meshes(("cp", "tp"), 8) if each] == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4
    # Each rank says the same of the ranks that it shares a tensor with.
    assert len({mesh_on(("cp", "tp"), rank, 8) for rank in range(4)}) == 1
    monkeypatch.setenv("GRAFTLAB_MESH", " ")
    give_mesh(None)
    assert mesh_on(("tp", "cp"), 0, 4) is None
    give_mesh({"tp": 4})
    assert mesh_on(("cp",), 0, 4) == Mesh()
    with pytest.raises(LayoutError, match=exactly("the mesh {'tp': 4} has 4 ranks, and this side 6")):
        mesh_on(("tp",), 0, 6)
    for wrong in ("cp", "cp=0", "cp=x", "cp=2 tp=2"):
        with pytest.raises(LayoutError):
            parse_mesh(wrong)
    with pytest.raises(
        LayoutError, match=exactly("mesh=4: give sizes by name, as in {'cp': 2, 'tp': 4}, or a DeviceMesh with names")
    ):
        give_mesh(4)


def test_a_device_mesh_is_taken_with_its_own_order_of_ranks() -> None:
    given: Any = SimpleNamespace(mesh_dim_names=("dp", "tp"), mesh=torch.tensor([[0, 2], [1, 3]]))
    give_mesh(given)
    assert [each.ranks for each in meshes(("tp",), 4) if each] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def megatron(monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool = False) -> None:
    # Rank 1 of 4: cp is the outer axis, tp the inner one.
    imported(
        monkeypatch,
        "megatron.core.parallel_state",
        get_tensor_model_parallel_group=group(0, 1),
        get_context_parallel_group=group(1, 3),
        get_data_parallel_group=group(1),
    )
    imported(
        monkeypatch, "megatron.training.global_vars", get_args=SimpleNamespace(sequence_parallel=sequence_parallel)
    )


def test_megatrons_groups_are_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch)
    assert mesh_on(("cp", "tp"), 1, 4) == GRID
    assert mesh_on(("sp", "ep"), 1, 4) == Mesh()
    # An axis of one rank splits nothing.
    assert mesh_on(("dp", "tp"), 1, 4) == Mesh((("tp", 2),))
    megatron(monkeypatch, sequence_parallel=True)
    give_mesh(None)
    assert mesh_on(("cp", "sp"), 1, 4) == Mesh((("cp", 2), ("sp", 2)))
    imported(monkeypatch, "megatron.core.parallel_state", get_context_parallel_group=group(1, 3))
    give_mesh(None)
    assert mesh_on(("cp", "sp"), 1, 4) == Mesh((("cp", 2),), (1, 3))


def test_groups_that_are_not_set_up_yet_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_yet() -> Any:
        raise AssertionError("tensor model parallel group is not initialized")

    imported(monkeypatch, "megatron.core.parallel_state")
    monkeypatch.setattr(
        sys.modules["megatron.core.parallel_state"], "get_tensor_model_parallel_group", not_yet, raising=False
    )
    assert mesh_on(("cp", "tp"), 1, 4) is None
    megatron(monkeypatch)
    assert mesh_on(("cp", "tp"), 1, 4) == GRID


def test_sglangs_attention_and_experts_divide_its_tensor_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(
        monkeypatch,
        "sglang.srt.distributed.parallel_state",
        get_tp_group=group(0, 1, 2, 3),
        get_moe_expert_parallel_world_size=2,
        get_moe_tensor_parallel_world_size=2,
        get_moe_data_parallel_world_size=1,
    )
    imported(monkeypatch, "sglang.srt.layers.dp_attention", get_attention_dp_size=2, get_attention_tp_size=2)
    assert mesh_on(("attn_tp",), 3, 4) == Mesh((("attn_tp", 2),), (2, 3))
    assert mesh_on(("moe_ep", "moe_tp"), 3, 4) == Mesh((("moe_ep", 2), ("moe_tp", 2)))
    assert mesh_on(("ep",), 3, 4) == Mesh((("ep", 2),), (1, 3))
    assert mesh_on(("tp",), 3, 4) == Mesh((("tp", 4),))
    # Without attention or experts in parallel, these axes have one rank.
    imported(monkeypatch, "sglang.srt.distributed.parallel_state", get_tp_group=group(0, 1, 2, 3))
    monkeypatch.delitem(sys.modules, "sglang.srt.layers.dp_attention")
    give_mesh(None)
    assert mesh_on(("attn_tp", "tp", "moe_tp", "ep"), 3, 4) == Mesh((("tp", 4),))


class TorchGroup:
    def __init__(self, name: str, *ranks: int) -> None:
        self.group_desc = name
        self.places = {rank: place for place, rank in enumerate(ranks)}


def test_torchs_groups_that_are_named_for_an_axis_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        TorchGroup("default_pg", 0, 1, 2, 3),
        TorchGroup("mesh_tp", 3, 1),
        TorchGroup("mesh_tp", 2, 0),
        TorchGroup("mesh_cp", 0, 2),
        TorchGroup("mesh_dp", 0, 1),
        TorchGroup("mesh_dp", 1, 2),
    ]
    world = SimpleNamespace(pg_group_ranks={each: each.places for each in groups})
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world))  # type: ignore[arg-type]
    # In their order on the axis.
    assert mesh_on(("tp",), 1, 4) == Mesh((("tp", 2),), (3, 1))
    # This rank is in no group of the first, and in two different ones of the second.
    assert mesh_on(("cp",), 1, 4) is None
    assert mesh_on(("tp", "dp"), 1, 4) is None


def test_vllms_groups_are_the_axes_and_an_irregular_grid_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "vllm.distributed.parallel_state", get_tp_group=group(0, 1), get_dp_group=group(0, 2))
    assert mesh_on(("dp", "tp"), 0, 4) == Mesh((("dp", 2), ("tp", 2)))
    imported(monkeypatch, "vllm.distributed.parallel_state", get_pcp_group=group(0, 2), get_ep_group=group(0, 1))
    give_mesh(None)
    assert mesh_on(("cp", "ep"), 0, 4) == Mesh((("cp", 2), ("ep", 2)))
    # The second of these would have a rank 5.
    for tp, dp in (((0, 1), (0, 1)), ((0, 3), (0, 2))):
        imported(monkeypatch, "vllm.distributed.parallel_state", get_tp_group=group(*tp), get_dp_group=group(*dp))
        give_mesh(None)
        with pytest.raises(LayoutError, match="not a grid of this side's 4 ranks"):
            mesh_on(("dp", "tp"), 0, 4)


def test_groups_that_are_known_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron(monkeypatch)
    assert mesh_on(("cp", "tp"), 1, 4) == GRID
    imported(monkeypatch, "megatron.core.parallel_state", get_tensor_model_parallel_group=group(1))
    assert mesh_on(("cp", "tp"), 1, 4) == GRID
    give_mesh(None)
    assert mesh_on(("cp", "tp"), 1, 4) == Mesh()


def test_a_layout_finds_its_mesh_and_names_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "s[cp] b h[tp]"
    unknown = rank_layout(torch.ones(1), text, 4, 1)
    assert unknown is not None
    assert "as in GRAFTLAB_MESH=cp=4,tp=1 or gl.attach(mesh=...)" in (unknown.unknown or "")
    assert (unknown.names, unknown.layout.steps) == (text, ())
    with pytest.raises(
        LayoutError,
        match=exactly(
            "shard(dim=0, mesh='cp') | shard(dim=1, mesh='tp'): it is unknown how 4 ranks are split over "
            "['cp', 'tp']; give the sizes, outermost first, as in GRAFTLAB_MESH=cp=4,tp=1 or "
            "gl.attach(mesh=...), or at the tap layout=graftlab.layouts.parse_layout(text, mesh={'cp': 4, "
            "'tp': 1})"
        ),
    ):
        rank_layout(torch.ones(1), "shard(dim=0, mesh='cp') | shard(dim=1, mesh='tp')", 4, 1)
    megatron(monkeypatch)
    known = rank_layout(torch.ones(1), text, 4, 1)
    assert known is not None
    assert (known.unknown, known.layout.mesh) == (None, GRID)
    # A known axis of size 1 splits nothing, also where it is the only one.
    only_sp = rank_layout(torch.ones(1), "s[sp] h", 4, 1)
    assert only_sp is not None
    assert only_sp.layout.mesh == Mesh((("rank", 4),))


def test_a_layout_with_a_mesh_keeps_the_names_of_dimensions() -> None:
    given = parse_layout("s[cp] b h[tp]", mesh={"cp": 2, "tp": 2})
    layout = rank_layout(torch.ones(1), given, 4, 1)
    assert layout is not None
    assert layout.names == "s[cp] b h[tp]"
    assert parse_layout("a b -> b a").names is None


def test_a_recording_keeps_the_mesh_that_its_rank_knew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    megatron(monkeypatch)
    recorder = TapRecorder(tmp_path, Place("baseline", 1, 4, 1), "True", None)
    both, one = (recorder._layout("x", torch.ones(2, 2), text) for text in ("s[cp] h[tp]", "s h[tp]"))
    recorder.tap("x", torch.ones(2, 2), None, {})
    recorder.close()
    assert both == StoredLayout("s[cp] h[tp]", [("cp", 2), ("tp", 2)])
    assert one == StoredLayout("s h[tp]")
