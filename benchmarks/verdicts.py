"""Accuracy and time of verdicts on the planted faults and benign variants of ``graftlab zoo``, and of a deep model."""

from __future__ import annotations

import math
import threading
import time
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread
from graftlab.errors import GraftWarning
from graftlab.lines.first_lost import first_lost
from graftlab.lines.operations import OperationRecorder
from graftlab.lines.traces import SliceTrace, slice_of
from graftlab.zoo import scoring
from graftlab.zoo.controls import CONTROLS
from graftlab.zoo.faults import FAULTS

# For a quick run: one fault of each regime, and two benign variants.
_FEW = ("other_theta", "values_gradient_halved", "up_columns_swapped", "tensor_parallel", "half_precision")


def measure(setup: Setup) -> list[Line]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraftWarning)
        every = [each.name for each in (*FAULTS, *CONTROLS)]
        found = list(scoring.score(names=_FEW if setup.quick else every))
    faults = [each for each in found if not each.is_control]
    controls = [each for each in found if each.is_control]
    exact = sum(each.exact for each in faults) / len(faults)
    wrong = sum(bool(each.innocents) or each.alarm for each in found)
    return [
        Line(
            "verdicts",
            f"verdict: share of {len(faults)} planted faults named exactly",
            "",
            Spread.of([exact]),
            budgets=(Budget("figure", "at least", 0.95),),
            in_docs=True,
        ),
        Line(
            "verdicts",
            f"verdict: innocents named, and alarms on {len(controls)} benign variants",
            "",
            Spread.of([float(wrong)]),
            budgets=(Budget("figure", "at most", 0.0),),
        ),
        Line("verdicts", "verdict: first named is a culprit", "", Spread.of([_first_right(faults)])),
        Line(
            "verdicts",
            "verdict that names something: runs",
            "",
            Spread.of(each.runs for each in found if each.labels),
            budgets=(Budget("figure", "at most", 8.0),),
            note=f"at most {max(each.runs for each in found)}",
            in_docs=True,
        ),
        Line("verdicts", "a verdict with its explanation", "s", Spread.of(each.seconds for each in found)),
        Line(
            "verdicts",
            "lines of source: attention of 36 operations, both sides traced and compared, processor time",
            "s",
            Spread.of(_seconds_for_lines() for _ in range(setup.repeats(9))),
            budgets=(Budget("figure", "at most", 0.5),),
        ),
        *_of_deep_model(setup),
    ]


def _seconds_for_lines() -> float:
    """Processor time for the operations of a wrong and of a right attention, 8 heads over 128 places of 256 numbers."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(2, 128, 256, generator=generator), *torch.randn(4, 256, 256, generator=generator) / 16)
    begun = time.process_time()
    baseline, target = (_traced(x, weights, scale) for scale in (1 / math.sqrt(32), 0.2))
    found = first_lost([baseline], [target], 0)
    seconds = time.process_time() - begun
    assert found.target[0].operation.name == "mul"
    return seconds


def _traced(x: Tensor, weights: list[Tensor], scale: float) -> SliceTrace:
    recorder = OperationRecorder()
    with recorder:
        recorder.set_by_tap(x, "x", changed=False)
        q, k, v = ((x @ weight).view(2, 128, 8, 32).transpose(1, 2) for weight in weights[:3])
        hidden = torch.ones(128, 128, dtype=torch.bool).triu(1)
        scores = (q @ k.mT * scale).masked_fill(hidden, -math.inf)
        result = recorder.read((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2) @ weights[3])
    return slice_of(recorder, result)


def _first_right(faults: list[scoring.Scored]) -> float:
    return sum(each.first_right for each in faults) / len(faults)


# ---- a deep model ---------------------------------------------------------------------------------------------------

_LAYERS, _PARTS, _WIDTH, _TOKENS = 48, 30, 64, 256
_STATUS, _SAMPLES_EVERY = Path("/proc/self/status"), 0.005


class _Layer(nn.Module):
    """A residual layer of as many taps as a decoder's layer has with the operations inside it."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(_PARTS))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x).tanh() * (1.01 if self.wrong else 1.0)
        return x


def _of_deep_model(setup: Setup) -> list[Line]:
    """Measure a verdict on about 1,500 taps in 48 layers, beside plain runs: those that compare every tap."""
    layers = 4 if setup.quick else _LAYERS
    with worlds.session(setup, compare="True") as session:
        session.run(_make_deep, _make_deep, args=(layers,))
        plain = []
        for _ in range(setup.repeats(5)):
            began = time.perf_counter()
            run = session.run(_forward_deep, _forward_deep)
            plain.append(time.perf_counter() - began)
        session.run(_watch_memory, _watch_memory)
        session.run(_forward_deep, _forward_deep)
        before = session.run(_peak, _peak)
        began = time.perf_counter()
        verdict = session.verdict(_forward_deep, _forward_deep)
        taken = time.perf_counter() - began
        after = session.run(_peak, _peak)
        taps = len(run.frame)
        assert verdict.named, verdict.text
    largest = _TOKENS * _WIDTH * 4
    most = max(
        late - early
        for side in ("baseline", "target")
        for early, late in zip(getattr(before, side), getattr(after, side), strict=True)
    )
    allowed = 10 * Spread.of(plain).median + 2.0
    return [
        Line(
            "verdicts",
            f"a verdict on {taps:,} taps, beside 10 plain runs and 2 s",
            "x",
            Spread.of([taken / allowed]),
            budgets=(Budget("figure", "at most", 1.0),),
            note=f"{taken:.2f} s, {verdict.runs} runs; a plain run {Spread.of(plain).median:.3f} s",
            in_docs=True,
        ),
        Line(
            "verdicts",
            f"its peak of memory on a rank beyond plain runs, in tensors of {largest >> 10:,} KiB",
            "",
            Spread.of([most / largest]),
            budgets=(Budget("figure", "at most", 2.0),),
            in_docs=True,
        ),
    ]


def _make_deep(layers: int) -> None:
    here = gl.here()
    assert here is not None
    torch.manual_seed(0)
    torch.set_num_threads(1)
    wrong = layers // 2 if here.side == "target" else -1
    model = nn.Sequential(*(_Layer(layer == wrong) for layer in range(layers)))
    gl.watch(model)
    here.vars["deep"] = model
    with torch.no_grad():
        model(torch.ones(_TOKENS, _WIDTH))


def _forward_deep() -> Tensor:
    here = gl.here()
    assert here is not None
    with torch.no_grad():
        out: Tensor = here.vars["deep"](torch.linspace(-1, 1, _TOKENS * _WIDTH).view(_TOKENS, _WIDTH))
    return out


class _MemoryWatch:
    """Samples this process's own memory, without what it shares, which its peak in ``/proc`` would include."""

    def __init__(self) -> None:
        self.peak = 0
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _sample(self) -> None:
        while True:
            (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
            self.peak = max(self.peak, int(line.split()[1]) << 10)
            time.sleep(_SAMPLES_EVERY)


def _watch_memory() -> None:
    here = gl.here()
    assert here is not None
    here.vars["memory"] = _MemoryWatch()


def _peak() -> int:
    """Return this rank's peak of private memory in bytes since the last call."""
    here = gl.here()
    assert here is not None
    watch: _MemoryWatch = here.vars["memory"]
    peak, watch.peak = watch.peak, 0
    return peak
