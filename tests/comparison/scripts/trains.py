"""Three training steps of a model that is split over the ranks as in tensor parallel. ``rate`` doubles the learning
rate; ``unreduced`` forgets the reduction of the backward pass; ``shifted`` adds a constant to the loss. ``normed`` has
an optimizer that is written here, which divides each gradient by its norm, and ``largest`` by another norm.
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
torch.manual_seed(0)


def summed(x: torch.Tensor) -> torch.Tensor:
    if RANKS > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


class Enter(torch.autograd.Function):
    """Passes its input, which all ranks have, to the part of each; each rank's gradient is a part of the sum."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if "unreduced" in sys.argv else summed(gradient)


class Leave(torch.autograd.Function):
    """Adds up what the ranks' parts give."""

    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Split(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        mine = slice(RANK * hidden // RANKS, (RANK + 1) * hidden // RANKS)
        up, down = torch.randn(hidden, width) / width**0.5, torch.randn(width, hidden) / hidden**0.5
        self.up, self.down = nn.Parameter(up[mine].clone()), nn.Parameter(down[:, mine].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Leave.apply(torch.relu(Enter.apply(x) @ self.up.T) @ self.down.T)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.split, self.last = nn.Linear(16, 16), Split(16, 32), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.split(x))


class Normed(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            size = weight.grad.norm()
            if "largest" in sys.argv:
                size = weight.grad.norm(torch.inf)
            weight.sub_(weight.grad / size, alpha=self.param_groups[0]["lr"])


model = Model()
kind = Normed if {"normed", "largest"} & {*sys.argv} else torch.optim.SGD
optimizer = kind(model.parameters(), 0.2 if "rate" in sys.argv else 0.1)
for _ in range(3):
    loss = model(torch.randn(3, 16)).square().mean()
    (loss + 0.5 if "shifted" in sys.argv else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
if RANKS > 1:
    dist.destroy_process_group()
