"""Four greedy decoding steps. In the third one two logits are equal, and the lower number is chosen. With ``rounds``
the other one is rounded upwards; with ``third`` the third largest is chosen.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embedding(ids))
        self.calls += 1
        if self.calls == 3:
            logits[..., [3, 7]] = 9.0
            if "rounds" in sys.argv:
                logits[..., 7] = logits[..., 7].nextafter(torch.tensor(10.0))
        return logits


model = Model()
ids = torch.tensor([[5], [6]])
with torch.no_grad():
    for step in range(4):
        logits = model(ids)[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        if "third" in sys.argv and step == 2:
            ids = logits.topk(3).indices[:, 2:]
        print("tokens", ids.flatten().tolist())
