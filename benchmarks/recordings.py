"""Reading a recording, as its replay does: one tensor after the other, with its checksum."""

from __future__ import annotations

import time

import torch

import graftlab as gl
from benchmarks.lines import Budget, Line, Setup, Spread

_TENSOR, _COUNT = 32 << 20, 12


def measure(setup: Setup) -> list[Line]:
    folder = setup.folder / "recording"
    count = setup.repeats(_COUNT)
    value = torch.randn(_TENSOR // 4)
    with gl.record(folder):
        for layer in range(count):
            gl.tap("hidden", value, layer=layer)
    recording = gl.Recording(folder)
    size = count * _TENSOR
    return [
        Line(
            "recordings",
            "read of a recording in 12 tensors of 32 MiB, checksums included",
            "B/s",
            # The first read of all takes new memory.
            Spread.of([size / _read(recording) for _ in range(setup.repeats(9) + 1)][1:]),
            limit=setup.copy_bandwidth,
            budgets=(Budget("share", "at least", 0.6),),
            note="the files are in the system's cache",
            in_docs=True,
        )
    ]


def _read(recording: gl.Recording) -> float:
    began = time.perf_counter()
    for _ in recording.taps(0):
        pass
    return time.perf_counter() - began
