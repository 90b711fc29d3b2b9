"""CUDA tensors: a graft between two ranks on one GPU against a copy on the device, and the cost for a forward pass."""

from __future__ import annotations

import time

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Line, Setup, Spread
from benchmarks.loops import Times, finish_work_on, graft_repeatedly
from benchmarks.machine import seconds

_DEVICE = "cuda:0"
_SIZE = 64 << 20
_FILTER = "name == 'hidden'"


def measure(setup: Setup) -> list[Line]:
    if not torch.cuda.is_available():
        return [Line("cuda", "cuda", note="skipped, no device")]
    return [_graft(setup), *_forward(setup)]


def _graft(setup: Setup) -> Line:
    one, other = (torch.full((_SIZE // 4,), value, device=_DEVICE) for value in (1.0, 2.0))

    def copy() -> None:
        one.copy_(other)
        finish_work_on(_DEVICE)

    limit = Spread.of(_SIZE / taken for taken in seconds(copy, setup.repeats(50), warm_up=5)).median
    with worlds.session(setup, device=_DEVICE, b2t=_FILTER) as session:
        run = session.run(_graft_on_device, _graft_on_device, args=(setup.repeats(50),))
        (times,) = run.target
    name = "graft 64 MiB float32 1+1 on one GPU, receiver"
    return Line("cuda", name, "B/s", Spread.of(_SIZE / taken for taken in times.taps), limit=limit, in_docs=True)


def _graft_on_device(repeats: int) -> Times:
    here = gl.here()
    assert here is not None
    device = str(here.device)
    return graft_repeatedly(gl.tap, gl.step, here.side, here.rank, _SIZE, "float32", repeats, device)


def _forward(setup: Setup) -> list[Line]:
    repeats = setup.repeats(30)
    with worlds.session(setup, device=_DEVICE) as session:
        untapped = session.run(_forwards, _forwards, args=(repeats, False)).target[0]
        session.edit(compare="True")
        compared = session.run(_forwards, _forwards, args=(repeats, True)).target[0]
    bare = Spread.of(untapped)
    added = Spread.of(taken / bare.median for taken in compared)
    return [
        Line("cuda", "transformer forward on the GPU, untapped", "s", bare),
        Line(
            "cuda",
            "transformer forward on the GPU, everything compared",
            "x",
            added,
            note="times as long as untapped",
            in_docs=True,
        ),
    ]


def _forwards(repeats: int, watch: bool) -> list[float]:
    here = gl.here()
    assert here is not None
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(here.device)
    x = torch.randn(8, 512, 1024, device=here.device)
    if watch:
        gl.watch(model)
    taken = []
    with torch.no_grad():
        for _ in range(3 + repeats):
            finish_work_on(here.device)
            began = time.perf_counter()
            model(x)
            finish_work_on(here.device)
            taken.append(time.perf_counter() - began)
            gl.step()
    return taken[3:]
