"""A prefill and three decoding steps, with caches in buffers, in an attribute and in a list that the caller passes.

With ``wrong`` the query of a decoding step is scaled; a prefill is right.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
WRONG = "wrong" in sys.argv


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("k", torch.zeros(1, 16, width))
        self.register_buffer("v", torch.zeros(1, 16, width))
        self.length = 0

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        new = slice(self.length, self.length + x.shape[1])
        self.k[:, new], self.v[:, new] = k, v
        self.length = new.stop
        seen.append(k)
        if WRONG and x.shape[1] == 1:
            q = 1.1 * q
        scores = q @ self.k[:, : new.stop].transpose(1, 2) / q.shape[-1] ** 0.5
        allowed = torch.ones(x.shape[1], new.stop).tril(new.start).bool()
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        return self.out(weights @ self.v[:, : new.stop])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(Attention(16) for _ in range(2))

    def forward(self, ids: torch.Tensor, seen: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, seen)
        return {"logits": self.head(x)}


model, seen = Model(), []
# As generate() of transformers does, from before the first call.
call = model.__call__
ids = torch.randint(0, 50, (1, 5))
with torch.inference_mode():
    for _ in range(4):
        ids = call(ids, seen=seen)["logits"][:, -1:].argmax(-1)
        print("token", ids.item())
print("cached", model.layers[0].length, len(seen))
