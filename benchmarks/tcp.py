"""Sending a tensor to another process over TCP on loopback, encrypted, against gloo's broadcast."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.lines import Line, Setup, Spread, quantity
from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo
from graftlab.exchange.arena import Arena, create_segment
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.rank_exchange import RankExchange
from graftlab.exchange.tcp import RouterSocket

_SIZES = ((64 << 10, 300), (4 << 20, 60), (64 << 20, 10))
_LIMIT = 300.0


def measure(setup: Setup) -> list[Line]:
    sizes = [(size, setup.repeats(repeats)) for size, repeats in _SIZES]
    folder = Path(tempfile.mkdtemp(dir=setup.folder))
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    token = new_token()
    ranks = [context.Process(target=_be_a_rank, args=(rank, str(folder), token, sizes, theirs)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT):
            raise TimeoutError(f"the two ranks did not finish within {_LIMIT:g} s")
        measured: list[tuple[list[float], list[float]]] = ours.recv()
    finally:
        for rank in ranks:
            rank.join(10.0)
            rank.kill()
    return [
        Line(
            "tcp",
            f"a tensor of {quantity(size, 'B')} over TCP, until it can be read",
            "s",
            Spread.of(mine),
            Spread.of(gloo),
            note="reference: gloo's broadcast on loopback, which encrypts nothing",
        )
        for (size, _), (mine, gloo) in zip(sizes, measured, strict=True)
    ]


def _be_a_rank(rank: int, folder: str, token: str, sizes: list[tuple[int, int]], line: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    exchange, router = _exchange(rank, token)
    exchange.begin_run(RunInfo(0, 0, (0, 1)))
    measured = [_measure(exchange, rank, step, *each) for step, each in enumerate(sizes)]
    if rank:
        line.send(measured)
    dist.barrier()
    router.close()
    dist.destroy_process_group()


def _exchange(rank: int, token: str) -> tuple[RankExchange[None], RouterSocket]:
    router = RouterSocket(derive_keys(token), b"rank %d" % rank, "127.0.0.1")
    ports: list[int] = [0, 0]
    dist.all_gather_object(ports, router.port)
    channel = router.connect(b"rank 0", "127.0.0.1", ports[0]) if rank else None
    while channel is None or not channel.linked:
        router.pump()
        channel = channel or router.channel_from(b"rank 1")
    router.wake()
    arena = Arena(*create_segment(), writable=True)
    place = Place("target" if rank else "baseline", 0, 1, 1)
    return RankExchange(place, arena, {1 - rank: (channel, None)}, timeout=_LIMIT), router


def _measure(
    exchange: RankExchange[None], rank: int, step: int, size: int, repeats: int
) -> tuple[list[float], list[float]]:
    """Return the receiver's seconds for graftlab's transfers and for gloo's, made in turns."""
    tensor, ours, gloo = torch.ones(size // 4), [], []
    for number in range(repeats):
        key = TapKey(step, "x", (), "original", number)
        dist.barrier()
        began = time.perf_counter()
        if rank:
            receipt = exchange.receive(key)
            ours.append(time.perf_counter() - began)
            receipt.release()
        else:
            exchange.publish(key, tensor, None)
        dist.barrier()
        began = time.perf_counter()
        dist.broadcast(tensor, 0)
        gloo.append(time.perf_counter() - began)
    exchange.end_step(step)
    return ours, gloo
