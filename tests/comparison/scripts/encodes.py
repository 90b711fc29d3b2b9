"""An encoder of three sequences: padded, or with ``packed`` one after the other, the shortest first, without padding.
``wrong`` has another eps in one norm.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
PACKED = "packed" in sys.argv
LENGTHS = (4, 7, 5)
ORDER = sorted(range(3), key=LENGTHS.__getitem__) if PACKED else range(3)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.out(self.attention(*self.qkv(self.norm(x)).chunk(3, -1)))
        return x + self.down(self.up(x).tanh())

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if PACKED:
            parts = (each.split([LENGTHS[number] for number in ORDER]) for each in (q, k, v))
            return torch.cat([(a @ b.mT / a.shape[-1] ** 0.5).softmax(-1) @ c for a, b, c in zip(*parts, strict=True)])
        allowed = torch.arange(q.shape[1]) < torch.tensor(LENGTHS)[:, None, None]
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16, padding_idx=0)
        self.layers = nn.ModuleList(Layer(16) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


model = Encoder().eval()
if "wrong" in sys.argv:
    model.layers[1].norm.eps = 0.1
draws = [torch.randint(1, 50, (length,)) for length in LENGTHS]
ids = torch.cat([draws[number] for number in ORDER]) if PACKED else nn.utils.rnn.pad_sequence(draws, batch_first=True)
with torch.no_grad():
    print(model(ids).shape)
