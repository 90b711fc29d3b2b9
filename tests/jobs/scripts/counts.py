"""A job of either side whose tensors say at which step they were made, until a file exists.

The baseline's are twice as large, so that a row tells by its difference whether both are of one step.
"""

import sys
import threading
from pathlib import Path

import torch

import graftlab as gl

stop, scale = Path(sys.argv[1]), float(sys.argv[2])
rest = threading.Event()
number = 0
gl.attach()
while not stop.exists():
    # Of a size that changes, so that memory is used in ever new ways.
    gl.tap("count", torch.full((1 + number % 7 * 3000,), scale * (1 + number)))
    gl.step()
    number += 1
    rest.wait(0.005)
print("counted", number > 0, gl.here() is not None)
