"""Taps that do nothing: one that no filter matches, and one without a session."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread
from benchmarks.reference import ReferenceGrafter, ReferencePlace, ReferenceWorld

_FILTER = "search('attn', name) and layer < 4"


def measure(setup: Setup) -> list[Line]:
    repeats, calls = (3, 2000) if setup.quick else (15, 20_000)
    with ReferenceWorld(1, 1) as reference, worlds.session(setup, b2t=_FILTER) as session:
        run = session.run(_unmatched, _unmatched, args=(repeats, calls))
        theirs = reference.run(_unmatched_reference, repeats, calls)
    empty = Spread.of(_time_calls(_empty, repeats, calls)).median
    return [
        Line(
            "taps",
            "tap that no filter matches",
            "s",
            Spread.of(run.baseline[0] + run.target[0]),
            Spread.of(theirs[0] + theirs[1]),
            limit=empty,
            budgets=(Budget("figure", "at most", 1e-6), Budget("ratio", "at least", 15)),
            in_docs=True,
        ),
        Line(
            "taps",
            "gl.tap without a session",
            "s",
            Spread.of(_time_calls(gl.tap, repeats, calls)),
            limit=empty,
            budgets=(Budget("figure", "at most", 150e-9),),
            note="limit: the call of an empty function",
            in_docs=True,
        ),
    ]


def _unmatched(repeats: int, calls: int) -> list[float]:
    torch.set_num_threads(1)
    return _time_calls(gl.tap, repeats, calls)


def _unmatched_reference(place: ReferencePlace, repeats: int, calls: int) -> list[float]:
    return _time_calls(ReferenceGrafter(place, b2t=_FILTER).tap, repeats, calls)


def _time_calls(tap: Callable[..., Any], repeats: int, calls: int) -> list[float]:
    """Seconds a call, without the first round of calls."""
    timer = timeit.Timer("tap('mlp_out', x, layer=7)", globals={"tap": tap, "x": torch.zeros(16)})
    return [taken / calls for taken in timer.repeat(repeats + 1, calls)[1:]]


def _empty(name: str, value: Any, /, *, extras: Any = None, **tags: Any) -> Any:
    return value
