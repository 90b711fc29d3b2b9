"""A job of either side that computes the same in each step, like a server that gets one request over and over.

Its second argument plants a fault in one layer.
"""

import sys
import threading
from pathlib import Path

import torch

import graftlab as gl

stop, fault = Path(sys.argv[1]), sys.argv[2]
generator = torch.Generator().manual_seed(0)
weights = [torch.randn(32, 32, generator=generator) / 32**0.5 for _ in range(3)]
tokens = torch.arange(16)
table = torch.randn(64, 32, generator=generator)
rest = threading.Event()
while not stop.exists():
    ids = gl.tap("tokens", tokens)
    x = table[ids]
    for layer, weight in enumerate(weights):
        h = gl.tap(f"layers.{layer}.h", x @ weight)
        wrong = fault == "act" and layer == 1
        x = x + gl.tap(f"layers.{layer}.act", torch.tanh(h) * (1.01 if wrong else 1.0))
    gl.tap("out", x)
    gl.step()
    rest.wait(0.02)
print("went on", gl.here() is not None)
