"""A training script that knows nothing of graftlab: one process, or several under torchrun."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

torch.manual_seed(0)
model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
wrong = len(sys.argv) > 1 and sys.argv[1] == "wrong"
if wrong:
    with torch.no_grad():
        model[2].weight[0, 0] += 0.5
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if wrong else 0.1)
loss_of = nn.MSELoss()
generator = torch.Generator().manual_seed(1)
for _ in range(3):
    batch = torch.randn(4, 4, generator=generator).chunk(size)[rank]
    optimizer.zero_grad()
    loss_of(model(batch), batch[:, :2]).backward()
    optimizer.step()
if size > 1:
    dist.destroy_process_group()
print("trained")
