"""Three steps of LBFGS, whose closure calls the model several times. ``rate`` has another learning rate, and ``scaled``
another loss, from the second step on.
"""

import sys

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
x, wanted = torch.randn(32, 8), torch.randn(32, 4)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
number = 0


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = (model(x) - wanted).square().mean()
    if "scaled" in sys.argv and number:
        loss = 1.1 * loss
    loss.backward()
    return loss


for number in range(3):
    if "rate" in sys.argv and number:
        optimizer.param_groups[0]["lr"] = 0.6
    optimizer.step(closure)
