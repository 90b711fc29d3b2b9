"""The cost of a step by its number of taps; the cost of one tap should not depend on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread
from benchmarks.reference import ReferenceGrafter, ReferencePlace, ReferenceWorld

_FILTER = "search('hidden', name)"
# Taps in a step, steps of graftlab, and steps of the reference.
_STEPS = ((10, 200, 20), (100, 60, 5), (1000, 15, 2), (10_000, 5, 0))

# Compared taps of 4 KiB in a step.
_COMPARED = 1000


def measure(setup: Setup) -> list[Line]:
    lines, costs = [], []
    with ReferenceWorld(1, 1) as reference, worlds.session(setup, b2t=_FILTER) as session:
        for taps, ours, theirs in _STEPS[:3] if setup.quick else _STEPS:
            run = session.run(_ours, _ours, args=(taps, setup.repeats(ours, 2)))
            taken = Spread.of(run.target[0])
            costs.append((taps, taken.median))
            beside = reference.run(_reference, taps, setup.repeats(theirs, 1))[1] if theirs else None
            lines.append(
                Line(
                    "steps",
                    f"step of {taps:,} taps, a tap",
                    "s",
                    Spread.of(each / taps for each in run.target[0]),
                    Spread.of(each / taps for each in beside) if beside else None,
                )
            )
        session.edit(b2t=None, compare="True")
        compared = session.run(_compared, _compared, args=(setup.repeats(60, 2),))
        whole = [max(both) for both in zip(compared.baseline[0], compared.target[0], strict=True)]
    counts, seconds = np.log(np.array(costs)).T
    exponent = float(np.polyfit(counts, seconds, 1)[0])
    note = "1 is linear; the slope of log(time of a step) over log(taps)"
    budgets = (Budget("figure", "at most", 60e-6),)
    name = f"tap compared, 4 KiB, a tap in a loop of {_COMPARED:,}"
    lines.append(Line("steps", name, "s", Spread.of(whole), budgets=budgets, in_docs=True))
    return [*lines, Line("steps", "growth with the number of taps", "", Spread.of([exponent]), note=note)]


def _ours(taps: int, repeats: int) -> list[float]:
    torch.set_num_threads(1)
    return _time_steps(gl.tap, gl.step, taps, repeats)


def _compared(repeats: int) -> list[float]:
    """Seconds a tap in each of ``repeats`` steps."""
    torch.set_num_threads(1)
    return [taken / _COMPARED for taken in _time_steps(gl.tap, gl.step, _COMPARED, repeats, torch.randn(1024))]


def _reference(place: ReferencePlace, taps: int, repeats: int) -> list[float]:
    grafter = ReferenceGrafter(place, b2t=_FILTER)
    return _time_steps(grafter.tap, grafter.step, taps, repeats)


def _time_steps(
    tap: Callable[..., Any], step: Callable[[], None], taps: int, repeats: int, value: torch.Tensor | None = None
) -> list[float]:
    """Seconds of each step of ``taps`` distinct small taps, without the first step."""
    value = torch.randn(64) if value is None else value
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for layer in range(taps):
            tap("hidden", value, layer=layer)
        step()
        taken.append(time.perf_counter() - began)
    return taken[1:]
