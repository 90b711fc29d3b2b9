"""A training job of either side, by SGD with momentum, on batches that both draw from one seed.

Its second argument plants a fault in the activation of one layer, or begins with a later batch.
"""

import sys
import threading
from pathlib import Path

import torch
from torch import nn

import graftlab as gl

stop, fault = Path(sys.argv[1]), sys.argv[2]


class Act(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.gain


class Block(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.act = Act(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(1.05 if fault == "act" and i == 1 else 1.0) for i in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
gl.attach()
gl.watch(model, exclude="type == 'Sequential'", grads=True, params=True, inputs=True)
gl.watch_training(model, optimizer)
generator = torch.Generator().manual_seed(1)
if fault == "ahead":
    torch.randn(2 * 8, 16, generator=generator)
rest = threading.Event()
while not stop.exists():
    batch = torch.randn(8, 16, generator=generator)
    optimizer.zero_grad()
    (model(batch) - batch.flip(-1)).square().mean().backward()
    optimizer.step()
    gl.step()
    rest.wait(0.02)
print("trained", gl.here() is not None)
