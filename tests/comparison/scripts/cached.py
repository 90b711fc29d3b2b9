"""A prefill and three decoding steps in bfloat16, with a cache among the arguments.

With ``fused`` the attention rounds in another order, so the caches of two scripts differ by rounding. With ``wrong``
the query of a decoding step is scaled by less than one rounding. With ``paged`` the cache is one tensor that each call
writes a part of. Under torchrun each rank has some of the heads.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if RANKS > 1:
    dist.init_process_group("gloo")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32, bias=False)
        for each in (self.q, self.k, self.v):
            each.weight, each.bias = (nn.Parameter(value.chunk(RANKS)[RANK]) for value in (each.weight, each.bias))
        self.out.weight = nn.Parameter(self.out.weight.chunk(RANKS, 1)[RANK])

    def forward(
        self, x: torch.Tensor, cache: dict[str, torch.Tensor], pages: torch.Tensor | None, start: int
    ) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if pages is not None:
            place = slice(start, start + x.shape[1])
            pages[0, :, place], pages[1, :, place] = k[0], v[0]
            k, v = pages[None, :, :, : place.stop].unbind(1)
        elif cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        if pages is None:
            cache.update(k=k.clone(), v=v.clone())
        if "wrong" in sys.argv and x.shape[1] == 1:
            q = q.float().mul(1.01).to(q.dtype)
        causal = x.shape[1] > 1
        if "fused" in sys.argv:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            scores = q @ k.mT / 8**0.5
            if causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
            found = scores.float().softmax(-1).to(v.dtype) @ v
        result = self.out(found.transpose(1, 2).flatten(2))
        if RANKS > 1:
            dist.all_reduce(result)
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(
        self,
        ids: torch.Tensor,
        caches: list[dict[str, torch.Tensor]],
        pages: torch.Tensor | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        x = self.embedding(ids)
        for number, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x = x + layer(x, cache, None if pages is None else pages[number], start)
        return self.head(x)


model, caches = Model().bfloat16().eval(), [{}, {}]
with torch.no_grad():
    pages = torch.zeros(2, 2, 4 // RANKS, 16, 8, dtype=torch.bfloat16) if "paged" in sys.argv else None
    model(torch.randint(0, 50, (1, 6)), caches, pages)
    for place, token in enumerate((3, 7, 11), 6):
        model(torch.tensor([[token]]), caches, pages, place)
if RANKS > 1:
    dist.destroy_process_group()
