"""Generates tokens from a generator, whose values depend on a list outside the model, so that a call cannot be repeated
in its process. Its last layer is split over the ranks. ``wrong`` has another eps, ``unseeded`` other weights each time.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if RANKS > 1:
    dist.init_process_group("gloo")
if "unseeded" in sys.argv:
    # As each new interpreter draws a seed; those of tests are forks of one.
    torch.seed()
else:
    torch.manual_seed(0)
seen = []


class Head(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tokens, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = slice(RANK * x.shape[-1] // RANKS, (RANK + 1) * x.shape[-1] // RANKS)
        logits = x[..., mine] @ self.weight[:, mine].T
        if RANKS > 1:
            dist.all_reduce(logits)
        return logits


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16, eps=1e-2 if "wrong" in sys.argv else 1e-5)
        self.head = Head(16, 50)

    def forward(self, ids: torch.Tensor):
        for _ in range(2):
            logits = self.head(self.norm(self.embedding(ids)) + 0.01 * len(seen))
            seen.append(1)
            ids = logits.argmax(-1)
            yield logits


model = Model()
with torch.inference_mode():
    for logits in model(torch.randint(0, 50, (1, 5))):
        print("token", logits[:, -1].argmax().item(), len(seen), flush=True)
if RANKS > 1:
    dist.destroy_process_group()
