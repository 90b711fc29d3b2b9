"""The ranks of a side widen a call together: none waits in a collective for a rank whose call has failed."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.groups import run_ranks
from kit.support import IS_2_6
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.widening import TrialOfRanks

RANKS = 2


def summed(x: torch.Tensor) -> torch.Tensor:
    total = x * 2
    dist.all_reduce(total)
    return total


def fails_alone(rank: int, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32 and rank == 1:
        raise TypeError("this rank wants bfloat16")
    return summed(x)


def fails_late(rank: int, x: torch.Tensor) -> torch.Tensor:
    total = summed(x)
    if x.dtype == torch.float32 and rank == 1:
        raise TypeError("too late")
    return total


def rounds_alone(rank: int, x: torch.Tensor) -> torch.Tensor:
    return summed(x.bfloat16() if rank else x)


def recovers(rank: int, x: torch.Tensor) -> torch.Tensor:
    try:
        return fails_alone(rank, x)
    except Exception:
        return summed(x)


def insists(rank: int, x: torch.Tensor) -> torch.Tensor:
    if rank:
        return rounds_alone(rank, x)
    for _ in range(3):
        with contextlib.suppress(Exception):
            return summed(x)
    return x


def passes_on(rank: int, x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(3, dtype=torch.bfloat16)
    if rank:
        dist.recv(buffer, 0)
    else:
        dist.send(x, 1)
    return buffer


CALLS: dict[str, tuple[Callable[[int, torch.Tensor], torch.Tensor], list[str | None]]] = {
    "summed": (lambda rank, x: summed(x), [None, None]),
    "fails alone": (
        fails_alone,
        ["rank 1 failed: TypeError: this rank wants bfloat16", "TypeError: this rank"],
    ),
    "fails late": (fails_late, ["rank 1 failed: TypeError: too late", "TypeError: too late"]),
    "rounds alone": (rounds_alone, ["rank 1 has reached 'c10d::allreduce_ torch.bfloat16'", "torch.bfloat16"]),
    "recovers": (recovers, [None, None]),
    "insists": (insists, ["rank 1 has reached 'c10d::allreduce_ torch.bfloat16'", "torch.bfloat16"]),
    "passes on": (passes_on, ["it sends tensors from rank to rank (c10d::send)", "rank to rank (c10d::recv_)"]),
}


def widen_calls(rank: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    x = torch.ones(3, dtype=torch.bfloat16)
    for name, (call, reasons) in CALLS.items():
        held = HeldCall(partial(call, rank, x), {}, {"x": x}, WatchChoice())
        found = held.widen({}, {}, TrialOfRanks(f"{folder}/{name}", rank, RANKS))
        expected = reasons[rank]
        if expected is None:
            assert found is None, (name, found)
            assert held()[""].dtype == torch.float32
        else:
            assert found is not None, name
            assert expected in found, (name, found)
            assert x.dtype == torch.bfloat16
        held.end()
    widen_a_dtensor(rank, folder)
    # After calls that failed on one rank, torch 2.6 may wait there for ever.
    if not IS_2_6:
        dist.destroy_process_group()


def widen_a_dtensor(rank: int, folder: Path) -> None:
    """A weight as transformers' tensor parallelism has it."""
    mesh = init_device_mesh("cpu", (RANKS,))
    layer, x = nn.Linear(3, 4, bias=False), torch.ones(2, 3, dtype=torch.bfloat16)
    whole = layer.weight.detach().bfloat16()
    layer.weight = weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    layer.register_buffer("table", distribute_tensor(whole, mesh, [Replicate()]))

    def call() -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = layer(DTensor.from_local(x, mesh, [Replicate()])).full_tensor()
            return result

    held = HeldCall(call, {"": layer}, {"x": x}, WatchChoice())
    # Only those that a rank has whole are sent.
    assert len(held.numbers() or {}) == 1
    assert held.widen({}, {}, TrialOfRanks(f"{folder}/dtensor", rank, RANKS)) is None
    assert torch.equal(held()[""], x.float() @ whole.float().T)
    held.end()
    assert layer.weight is weight
    assert (weight.dtype, weight.to_local().dtype, weight.requires_grad) == (torch.bfloat16, torch.bfloat16, True)
    assert call().dtype == torch.bfloat16


@pytest.mark.ranks
def test_all_ranks_of_a_side_widen_a_call_or_none(tmp_path: Path) -> None:
    run_ranks(widen_calls, tmp_path, RANKS)
