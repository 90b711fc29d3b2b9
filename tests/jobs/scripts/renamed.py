"""A job whose taps have other names on each side, and on the target tokens before the batch; each step has other data.

Its second argument plants a fault in one layer of the target.
"""

import os
import sys
import threading
from pathlib import Path

import torch

import graftlab as gl

stop, fault = Path(sys.argv[1]), sys.argv[2]
is_target = os.environ["GRAFTLAB_ROLE"] == "target"
generator = torch.Generator().manual_seed(0)
weights = [torch.randn(16, 16, generator=generator) / 4 for _ in range(3)]
rest = threading.Event()


def shown(name: str, x: torch.Tensor) -> torch.Tensor:
    return gl.tap(name, x.transpose(0, 1).contiguous()).transpose(0, 1) if is_target else gl.tap(name, x)


prefix, linear, act, out = ("blocks", "dense", "gelu", "final") if is_target else ("h", "fc", "act", "out")
while not stop.exists():
    x = torch.randn(2, 5, 16, generator=generator)
    for layer, weight in enumerate(weights):
        h = shown(f"{prefix}.{layer}.{linear}", x @ weight)
        wrong = is_target and fault == "act" and layer == 1
        x = x + shown(f"{prefix}.{layer}.{act}", torch.tanh(h) * h.abs() ** (0.5 if wrong else 1.0))
    shown(out, x)
    gl.step()
    rest.wait(0.02)
