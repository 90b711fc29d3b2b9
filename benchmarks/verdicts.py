"""Accuracy and time of verdicts on the planted faults and benign variants of ``graftlab zoo``."""

from __future__ import annotations

import math
import time
import warnings

import torch
from torch import Tensor

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
        Line("verdicts", "verdict: runs, with its explanation", "", Spread.of(each.runs for each in found)),
        Line("verdicts", "a verdict with its explanation", "s", Spread.of(each.seconds for each in found)),
        Line(
            "verdicts",
            "lines of source: attention of 36 operations, both sides traced and compared, processor time",
            "s",
            Spread.of(_seconds_for_lines() for _ in range(setup.repeats(9))),
            budgets=(Budget("figure", "at most", 0.5),),
        ),
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
