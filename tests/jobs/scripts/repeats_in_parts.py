"""A job of either side that computes the same in each step, each of its ranks with its part of the hidden dimension.

Its second argument names a file; what that holds when a step begins says where this side is wrong: ``TAP@RANK``.
"""

import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import graftlab as gl

stop, told = Path(sys.argv[1]), Path(sys.argv[2])
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    dist.init_process_group("gloo", init_method=os.environ.get("MEETING"), rank=rank, world_size=size)
generator = torch.Generator().manual_seed(0)
table = torch.randn(16, 32, generator=generator)
ups = [torch.randn(32, 64, generator=generator) / 32**0.5 for _ in range(3)]
downs = [torch.randn(64, 32, generator=generator) / 64**0.5 for _ in range(3)]
mine = slice(64 // size * rank, 64 // size * (rank + 1))
part = {"layout": "shard(dim=-1, mesh='tp')"} if size > 1 else {}
whole = {"layout": "replicate(mesh='tp')"} if size > 1 else {}


def tap(layer: int, name: str, value: torch.Tensor, layout: dict[str, str]) -> torch.Tensor:
    return gl.tap(
        f"layers.{layer}.{name}", value * 1.01 if layer == 1 and wrong == f"{name}@{rank}" else value, **layout
    )


rest = threading.Event()
gl.attach()
while True:
    wrong = told.read_text() if told.exists() else ""
    ended = torch.tensor(int(stop.exists()))
    if size > 1:
        # What one has seen counts for all: they have to end with the same step.
        dist.all_reduce(ended)
    if ended:
        break
    x = table[gl.tap("tokens", torch.arange(16), **whole)]
    for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
        act = tap(layer, "act", torch.tanh(tap(layer, "h", x @ up[:, mine], part)), part)
        mlp = act @ down[mine]
        if size > 1:
            dist.all_reduce(mlp)
        x = x + tap(layer, "mlp", mlp, whole)
    gl.tap("out", x, **whole)
    gl.step()
    # Ranks of one side come to a step at different times.
    rest.wait(0.01 * (1 + rank))
print("went on", gl.here() is not None)
