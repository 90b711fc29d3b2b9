"""Models that torch shards, by FSDP2, ``parallelize_module`` and both on a mesh, are compared with one rank.

Sizes are such that most shards are uneven: 10 rows over 4 ranks, 5 over 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.support import FSDP_ON_CPU, not_on

import graftlab as gl

RANKS = 1, 4

pytestmark = pytest.mark.ranks

KINDS = (
    pytest.param("fsdp", marks=not_on("2.6", FSDP_ON_CPU)),
    "tp",
    pytest.param("fsdp and tp", marks=not_on("2.6", FSDP_ON_CPU)),
)
WHOLE_OF_BOTH = pytest.param(
    "fsdp and tp", marks=[*KINDS[2].marks, not_on("2.9", "puts uneven shards of two dimensions together wrongly")]
)


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def model_of(kind: str) -> torch.nn.Module:
    """The same weights everywhere; on the target's ranks sharded as ``kind`` says, its activations too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(6, 10))
    model.add_module("act", torch.nn.Tanh())
    model.add_module("down", torch.nn.Linear(10, 5))
    if gl.here().side == "baseline":
        return model
    mesh = init_device_mesh(
        "cpu", (2, 2) if kind == "fsdp and tp" else (1, 4) if kind == "tp" else (4, 1), mesh_dim_names=("dp", "tp")
    )
    if "tp" in kind:
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(use_local_output=False)}
        parallelize_module(model, mesh["tp"], plan)
    if "fsdp" in kind:
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def forward(kind: str, shift: float) -> list[list[float]]:
    """All ranks see the same batch; on the target the output of ``up`` is shifted by ``shift``."""
    import torch.distributed as dist

    model = model_of(kind)
    if shift and gl.here().side == "target":
        model.up.register_forward_hook(lambda module, args, output: output + shift)
    with torch.no_grad(), gl.watch(model, params=True):
        found = whole(model(torch.linspace(-1, 1, 18).reshape(3, 6)))
    if gl.here().side == "target":
        dist.barrier()
    return found.tolist()


def train(kind: str) -> float:
    """One step of training; its gradients are tapped as the optimizer is given them."""
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gl.watch_training(model, optimizer):
        loss = whole(model(torch.linspace(-1, 1, 18).reshape(3, 6))).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss)


# ---- what is promised -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_activations_are_compared_as_the_whole_tensors_that_they_are(
    session: gl.Session, kind: str
) -> None:
    frame = session.run(forward, forward, args=(kind, 0.0)).frame
    assert set(frame["status"]) == {"compared"}, frame[["name", "status", "error"]].to_string()
    assert set(frame["rank"]) == {0, 1, 2, 3}
    assert set(frame["name"]) == {"up", "act", "down", "output", "up.weight", "up.bias", "down.weight", "down.bias"}
    assert frame["max_abs"].max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_difference_shows_on_every_rank_that_has_a_part_of_it(session: gl.Session, kind: str) -> None:
    frame = session.run(forward, forward, args=(kind, 0.5)).frame
    values = frame[frame["kind"].isna()]
    assert values.loc[values["name"] == "up", "max_abs"].tolist() == pytest.approx([0.5] * 4)
    assert values.loc[values["name"] == "output", "max_abs"].min() > 0.01
    assert frame.loc[frame["kind"] == "param", "max_abs"].max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_graft_repairs_the_sharded_model(session: gl.Session, kind: str) -> None:
    right = session.run(forward, forward, args=(kind, 0.0)).baseline
    session.edit(b2t="name == 'up'", compare=None)
    run = session.run(forward, forward, args=(kind, 0.5))
    assert set(run.frame["status"]) == {"grafted"}, run.frame[["name", "status", "error"]].to_string()
    for found in run.target:
        assert torch.allclose(torch.tensor(found), torch.tensor(right[0]), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_graft_from_a_sharded_model_into_a_single_rank(session: gl.Session, kind: str) -> None:
    wrong = session.run(forward, forward, args=(kind, 0.5)).target
    session.edit(t2b="name == 'act'", compare=None)
    run = session.run(forward, forward, args=(kind, 0.5))
    assert run.frame["status"].tolist() == ["grafted"], run.frame[["name", "status", "error"]].to_string()
    assert torch.allclose(torch.tensor(run.baseline[0]), torch.tensor(wrong[0]), atol=1e-6)


@pytest.mark.parametrize("direction", ["b2t", "t2b"])
@pytest.mark.parametrize("kind", [*KINDS[:2], WHOLE_OF_BOTH])
def test_weights_are_grafted_between_one_rank_and_uneven_shards(session: gl.Session, kind: str, direction: str) -> None:
    session.edit(**{direction: "kind == 'param'"}, compare=None)
    run = session.run(weights, weights, args=(kind,))
    assert set(run.frame["status"]) == {"grafted"}, run.frame[["name", "status", "error"]].to_string()
    first = run.baseline[0]
    for found in (*run.baseline, *run.target):
        assert found == first
    assert (first[0][0][0] == 7.0) == (direction == "t2b")


def apart(groups_differ: bool) -> None:
    """Each group of tensor parallelism has its half of the batch, or what should be the same and is not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(24.0).reshape(4, 6)
    if gl.here().side == "baseline":
        gl.tap("x", whole)
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = gl.here().rank // 2
    mine = whole + group if groups_differ else whole.chunk(2)[group]
    gl.tap("x", distribute_tensor(mine.contiguous(), mesh["tp"], [Shard(1)]))


def test_batch_groups_join_to_one_whole_and_differing_groups_are_refused(session: gl.Session) -> None:
    session.edit(t2b="True", compare=None)
    row = session.run(apart, apart, args=(False,)).frame.iloc[0]
    assert (row["status"], row["max_abs"]) == ("grafted", 0.0)
    assert "inferred" in row["layout"]
    row = session.run(apart, apart, args=(True,)).frame.iloc[0]
    assert row["status"] == "failed"
    assert "2 groups of senders hold different tensors" in row["error"]


def weights(kind: str) -> list[Any]:
    """The weights after a call in which they are tapped; the target begins with sevens."""
    model = model_of(kind)
    if gl.here().side == "target":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7.0)
    with torch.no_grad(), gl.watch(model, params=True, include="type == 'Linear'"):
        model(torch.ones(3, 6))
    for part in model.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    return [whole(parameter.detach()).tolist() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_updates_of_sharded_weights_are_compared_as_wholes(session: gl.Session, kind: str) -> None:
    frame = session.run(train, train, args=(kind,)).frame
    assert set(frame["status"]) <= {"compared"}, frame[["name", "kind", "status", "error"]].to_string()
    assert {"param_grad", "param"} <= set(frame["kind"])
    assert frame["max_abs"].max() < 1e-6
