"""How costs grow: a graft, a compared tap, a frame, a verdict and a match, by taps, ranks, bytes and rows.

Each line is a slope: the exponent of the cost between two neighbouring sizes, the largest of all pairs. 1 is linear.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.rows import SampleRows

_PLANS: tuple[tuple[str, dict[str, Any]], ...] = (("compared", {"compare": "True"}), ("grafted", {"b2t": "True"}))
_TAPS = (100, 1_000, 10_000)
_RANKS = (2, 8, 32)
# In a cache; and beyond all of them and as large as what a sender buffers, so that the two sides take turns. Sizes
# between these would show the memory's share of the time, and those turns, as growth.
_BYTES = (4 << 10, 256 << 20, 1 << 30)
# A frame of ten million rows takes more memory than a small machine has.
_ROWS = (10_000, 100_000, 1_000_000)
_TAPS_OF_RANKS = 100
# Tensors of this many bytes in all are tapped at each size, between the least and the most taps.
_BYTES_IN_ALL, _LEAST_TAPS, _MOST_TAPS = 256 << 20, 5, 500
# Linear, and what the noise of the figures adds to a slope over a factor of ten.
_LINEAR = 1.15


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Return the largest exponent of ``costs`` between neighbouring ``sizes``, which ascend."""
    pairs = list(zip(sizes, costs, strict=True))
    return max(
        math.log(more_cost / cost) / math.log(more / size)
        for (size, cost), (more, more_cost) in itertools.pairwise(pairs)
    )


def measure(setup: Setup) -> list[Line]:
    return [*_by_taps(setup), *_by_ranks(setup), *_by_bytes(setup), *_by_rows(setup)]


def _line(what: str, by: str, sizes: Sequence[float], costs: Sequence[float], unit: str = "") -> Line:
    return Line(
        "growth",
        f"slope of {what} by {by}, {_size(sizes[0], unit)} to {_size(sizes[-1], unit)}",
        "",
        Spread.of([slope(sizes, costs)]),
        budgets=(Budget("figure", "at most", _LINEAR),),
        note=", ".join(quantity(cost, "s") for cost in costs),
    )


def _size(size: float, unit: str) -> str:
    return quantity(size, unit) if unit else f"{size:,.0f}"


def _least(call: Callable[[], object], repeats: int, warm_up: int = 1) -> float:
    """Return the least time of some calls, which other processes disturb least."""
    for _ in range(warm_up):
        call()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


# ---- taps -----------------------------------------------------------------------------------------------------------


def _by_taps(setup: Setup) -> list[Line]:
    """Measure runs of both sides with that many taps of 64 bytes."""
    sizes = _TAPS[:2] if setup.quick else _TAPS
    lines = []
    for what, plan in _PLANS:
        costs = []
        for count in sizes:
            with worlds.session(setup, **plan) as session:
                costs.append(_least(partial(session.run, _chain, _chain, args=(count,)), setup.repeats(3, 1)))
        lines.append(_line(f"a {what} step", "taps", sizes, costs))
    matches, verdicts = [], []
    for count in sizes:
        with worlds.session(setup, compare="True") as session:
            once = 1 if count == _TAPS[-1] else setup.repeats(3, 1)
            matches.append(_least(partial(session.match, _chain, _chain, args=(count,)), once, warm_up=once > 1))
            began = time.perf_counter()
            verdict = session.verdict(_chain, _wrong_chain, args=(count,))
            verdicts.append(time.perf_counter() - began)
            assert verdict.named, f"the verdict on {count:,} taps names nothing: {verdict}"
    return [*lines, _line("a match", "taps", sizes, matches), _line("a verdict", "taps", sizes, verdicts)]


def _chain(count: int, wrong: int = -1) -> torch.Tensor:
    """Tap a value that each layer of a deep model changes; ``wrong`` is the layer with a mistake."""
    torch.set_num_threads(1)
    value = torch.linspace(-1, 1, 16)
    for layer in range(count):
        value = torch.sin(value + layer) if layer != wrong else torch.sin(value + layer) * 1.01
        value = gl.tap(f"layers.{layer}.out", value)
    return value


def _wrong_chain(count: int) -> torch.Tensor:
    return _chain(count, wrong=count // 2)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def _by_ranks(setup: Setup) -> list[Line]:
    """Measure runs of that many ranks on this machine's cores: all work of all ranks.

    Each receiver gets the tensor of each sender, so the work is proportional to the pairs of ranks, not to the ranks.
    """
    sizes = _RANKS[:2] if setup.quick else _RANKS
    pairs = [(ranks // 2) ** 2 for ranks in sizes]
    lines = []
    for what, plan in _PLANS:
        costs = []
        for ranks in sizes:
            with worlds.session(setup, ranks // 2, ranks // 2, **plan) as session:
                call = partial(session.run, _chain, _chain, args=(_TAPS_OF_RANKS,))
                costs.append(_least(call, setup.repeats(5, 2)))
        lines.append(_line(f"a {what} step", f"pairs of {sizes[0]} to {sizes[-1]} ranks", pairs, costs))
    return lines


# ---- bytes ----------------------------------------------------------------------------------------------------------


def _by_bytes(setup: Setup) -> list[Line]:
    """Measure a tap of that many bytes, between one rank of each side."""
    sizes = _BYTES[:2] if setup.quick else _BYTES
    lines = []
    for what, plan in _PLANS:
        with worlds.session(setup, **plan) as session:
            costs = [_tap_of(session, size) for size in sizes]
        lines.append(_line(f"a {what} tap", "bytes", sizes, costs, "B"))
    return lines


def _tap_of(session: gl.Session, size: int) -> float:
    repeats = max(_LEAST_TAPS, min(_MOST_TAPS, _BYTES_IN_ALL // size))
    taken: list[float] = session.run(_tap_repeatedly, _tap_repeatedly, args=(size, repeats)).target[0]
    return min(taken)


def _tap_repeatedly(size: int, repeats: int) -> list[float]:
    """Return the seconds of each tap and step, after a first one."""
    torch.set_num_threads(1)
    value, taken = torch.ones(size // 4), []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        gl.tap("x", value)
        gl.step()
        taken.append(time.perf_counter() - began)
    return taken[1:]


# ---- rows -----------------------------------------------------------------------------------------------------------


def _by_rows(setup: Setup) -> list[Line]:
    """Measure the first frame of a session with that many rows."""
    sizes = _ROWS[:2] if setup.quick else _ROWS
    costs = []
    sample = SampleRows()
    for count in sizes:
        with worlds.session(setup) as session:
            sample.send(session, count)
            began = time.perf_counter()
            frame = session.frame
            costs.append(time.perf_counter() - began)
            assert len(frame) == count
            del frame
    return [_line("a first frame", "rows", sizes, costs)]
