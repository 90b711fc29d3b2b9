"""A job of either side whose tensors say at which of the job's steps they were made, from the one at which it resumes.

With FALL_AT its last rank kills itself before that step, unless torchrun has restarted it. When the file that PLANT
names exists, graftlab's own thread fails from then on, whatever it hears; the file is gone when that is so.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch

import graftlab as gl
from graftlab.ranks import control_thread


def broken(*_: object) -> None:
    raise RuntimeError("planted in graftlab's thread")


stop, scale, number, pause = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
fall_at, plant = int(os.environ.get("FALL_AT", -1)), Path(os.environ.get("PLANT", "nothing"))
is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
rest = threading.Event()
gl.attach()
while not stop.exists():
    if number == fall_at and is_last and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if plant.exists():
        control_thread.unpack_to_rank = broken
        plant.unlink()
    gl.tap("count", torch.full((4,), scale * (1 + number)))
    gl.step()
    number += 1
    rest.wait(pause)
print("counted", gl.here() is not None)
