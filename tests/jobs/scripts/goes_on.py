"""A job of either side that continues until a file exists. It scales by what it is given."""

import signal
import sys
import threading
from pathlib import Path

import torch

handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}

import graftlab as gl  # noqa: E402

stop, scale = Path(sys.argv[1]), float(sys.argv[2])
rest = threading.Event()
number = 0
while not stop.exists():
    x = torch.arange(6.0) * scale
    x = gl.tap("hidden", x, layer=0)
    gl.tap("out", x.sum())
    gl.step()
    number += 1
    # A training step that takes some time, so that rows do not fill the disk.
    rest.wait(0.005)
assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers, "a handler was replaced"
print("went on", gl.here() is not None)
