"""Held calls of a model that FSDP shards."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.groups import run_ranks
from kit.support import FSDP_ON_CPU, not_on
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from graftlab.grafting.tap_records import CountingHandler
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_update import GradientWatch, HeldUpdate
from graftlab.taps.routing import handled_by

RANKS = 2


def gradients_of(held: HeldCall, model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights' gradients of one call, or this rank's part of them."""
    held()
    left = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in left.items()}


def hold_calls(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(3, 8)
    expected = model(x)
    plain = HeldCall(lambda: model(x), {"": model}, {"x": x}, WatchChoice())
    assert plain.try_backward() is None
    gradients = {name: each.clone() for name, each in gradients_of(plain, model).items()}
    plain.end()
    assert len(gradients) == 4
    mesh = init_device_mesh("cpu", (RANKS,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    held = HeldCall(lambda: model(x), {"": model}, {"x": x}, WatchChoice())
    described = held.describe()
    assert described.fails_when_repeated is None
    assert described.not_repeated == ()
    assert held.widen({}, {}) == "FSDP2 shards the weights, and gathers them from memory of 16 bits"
    assert held.try_backward() is None
    with handled_by(CountingHandler()):
        results = [held()[""] for _ in range(2)]
    # The module at the root keeps its weights gathered after a call.
    for _ in range(2):
        found = gradients_of(held, model)
        assert found.keys() == gradients.keys()
        for name, part in found.items():
            assert torch.allclose(part, gradients[name].chunk(RANKS)[rank], rtol=1e-4, atol=1e-5)
    held.end()
    inputs = x.clone().requires_grad_()
    with_graph = HeldCall(lambda: model(inputs), {"": model}, {"x": inputs}, WatchChoice())
    assert with_graph.try_backward() == "FSDP2 shards the weights, and an argument requires a gradient"
    with_graph.end()
    # Each call, and the script's own, begins where every rank has its part of the weights.
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    for found in (*results, described.plain[""], model(x)):
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    watch = GradientWatch()
    model.reshard()
    watch.add_weights(model)
    watch.install()
    for factor in (1.0, 3.0):
        model.zero_grad()
        (factor * model(x).sum()).backward()
    watch.remove()
    assert all(isinstance(weight.grad, DTensor) for weight in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    update = HeldUpdate(optimizer.step, optimizer, {"": model}, watch, {}, number=1, calls=1).describe()
    # Those of the last backward pass, before they are clipped.
    assert len(update.of_shards) == 4
    factors = [after.norm / before.norm for before, after in update.of_shards]
    assert max(factors) - min(factors) < 1e-5 < max(factors) < 0.1
    for (before, _), weight in zip(update.of_shards, model.parameters(), strict=True):
        assert before.shape == tuple(weight.to_local().shape)
    watch.begin_step()
    assert watch.of_shards == {}
    dist.destroy_process_group()


@pytest.mark.ranks
@pytest.mark.timeout(240)
@not_on("2.6", FSDP_ON_CPU)
def test_calls_of_a_sharded_model_are_repeated_in_their_processes(tmp_path: Path) -> None:
    run_ranks(hold_calls, tmp_path, RANKS)
