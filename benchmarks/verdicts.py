"""Accuracy and time of verdicts on the planted faults and benign variants of ``graftlab zoo``."""

from __future__ import annotations

import warnings

from benchmarks.lines import Budget, Line, Setup, Spread
from graftlab.errors import GraftWarning
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
    ]


def _first_right(faults: list[scoring.Scored]) -> float:
    return sum(each.first_right for each in faults) / len(faults)
