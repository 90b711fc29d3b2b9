"""A training job of either side, by SGD with momentum, on batches that both draw from one seed.

Its second argument plants a fault: in the activation of one layer, or in the optimizer.
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


torch.manual_seed(0)
model = nn.Sequential()
for layer in range(3):
    model.append(nn.Linear(16, 16))
    model.append(Act(1.05 if fault == "act" and layer == 1 else 1.0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
gl.attach()
shows = fault != "unwatched" and "plain" not in sys.argv
gl.watch(model, grads=shows, params=shows, inputs=shows)
if shows:
    gl.watch_training(model, optimizer)
generator = torch.Generator().manual_seed(1)
rest = threading.Event()
while not stop.exists():
    batch = torch.randn(8, 16, generator=generator)
    optimizer.zero_grad()
    (model(batch) - batch.flip(-1)).square().mean().backward()
    if fault == "optimizer":
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(0.999)
    optimizer.step()
    gl.step()
    rest.wait(0.002)
print("trained", gl.here() is not None)
