"""A target's job that is killed at the beginning of a step."""

import os
import signal
import sys

import torch

import graftlab as gl

last = int(sys.argv[1])
for number in range(100):
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    gl.tap("hidden", torch.arange(12.0).reshape(2, 6) + number, layer=0)
    gl.step()
