"""Taps in compiled code: the cost for compiling the quickstart's model, and for its compiled forward pass."""

from __future__ import annotations

import importlib.util
import shutil
import time
from typing import Any

import torch

import graftlab as gl
from benchmarks import minilm, worlds
from benchmarks.lines import Budget, Line, Setup, Spread

_ROUNDS = 5
_FORWARDS = 10


def measure(setup: Setup) -> list[Line]:
    if missing := [package for package in minilm.NEEDED if importlib.util.find_spec(package) is None]:
        return [Line("compiled", "compiled MiniLM", note=f"skipped, {', '.join(missing)} not installed")]
    if shutil.which("g++") is None:
        return [Line("compiled", "compiled MiniLM", note="skipped, inductor needs g++ on a CPU")]
    repeats = setup.repeats(_FORWARDS, 2)
    untapped: list[float] = []
    unwanted: list[float] = []
    compared: list[float] = []
    with worlds.session(setup) as session:
        session.run(minilm.load_on_rank, minilm.load_on_rank)
        # Both sides compile at the same time, on the same cores.
        first_untapped = _slowest(session.run(_first_call, _first_call, args=(False,)))
        first_tapped = _slowest(session.run(_first_call, _first_call, args=(True,)))
        for _ in range(setup.repeats(_ROUNDS, 1) + 1):
            untapped += _slower_side(session, repeats, tapped=False)
            session.edit(compare="False")
            unwanted += _slower_side(session, repeats, tapped=True)
            session.edit(compare="True")
            compared += _slower_side(session, repeats, tapped=True)
        taps = len(session.runs[-1].frame) // repeats
    bare = Spread.of(untapped[repeats:])
    with_taps, with_compare = (
        Spread.of(each / bare.median for each in taken[repeats:]) for taken in (unwanted, compared)
    )
    return [
        Line("compiled", "compiled MiniLM, first call untapped", "s", Spread.of([first_untapped])),
        Line("compiled", "compiled MiniLM, first call with taps", "s", Spread.of([first_tapped])),
        Line("compiled", "compiled MiniLM forward, untapped", "s", bare),
        Line(
            "compiled",
            "compiled MiniLM forward, nothing compared",
            "x",
            with_taps,
            budgets=(Budget("figure", "at most", 1.1),),
            note=f"{taps} taps while some are wanted, and none in the graph while none is",
            in_docs=True,
        ),
        Line(
            "compiled",
            "compiled MiniLM forward, everything compared",
            "x",
            with_compare,
            budgets=(Budget("figure", "at most", 1.8),),
            in_docs=True,
        ),
    ]


def _compiled(tapped: bool) -> Any:
    here = gl.here()
    assert here is not None
    gl.compile_taps(None if tapped else "False")
    key = f"compiled, {tapped}"
    if key not in here.vars:
        model = here.vars["model"]
        if tapped:
            gl.watch(model)
        here.vars[key] = torch.compile(model)
    return here.vars[key]


def _first_call(tapped: bool) -> float:
    here = gl.here()
    assert here is not None
    began = time.perf_counter()
    with torch.no_grad():
        _compiled(tapped)(**here.vars["tokens"])
    return time.perf_counter() - began


def _slower_side(session: gl.Session, repeats: int, *, tapped: bool) -> list[float]:
    run = session.run(_forwards, _forwards, args=(repeats, tapped))
    return [max(all_ranks) for all_ranks in zip(*run.baseline, *run.target, strict=True)]


def _forwards(repeats: int, tapped: bool) -> list[float]:
    here = gl.here()
    assert here is not None
    return minilm.time_forwards(_compiled(tapped), here.vars["tokens"], gl.step, repeats)


def _slowest(run: gl.Run) -> float:
    return float(max(*run.baseline, *run.target))
