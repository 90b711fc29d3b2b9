"""Rows: their rate into the frame, the pauses of the notebook meanwhile, and large frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.machine import seconds
from graftlab.control.core import internals_of
from graftlab.diffs import measure as diffs
from graftlab.grafting import active
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row

_TICK = 1e-3
# Placeholders for the step and the order; no other column of an encoded row has these numbers.
_STEP, _ORDER = 987654321, 987654323
_TAPS = 50


def measure(setup: Setup) -> list[Line]:
    return [*_from_taps(setup), *_as_fast_as_they_come(setup), *_large_frames(setup)]


def _from_taps(setup: Setup) -> list[Line]:
    """Measure rows of real taps, as fast as one receiver makes them."""
    count = 1000 if setup.quick else 10_000
    rates = []
    with worlds.session(setup, compare="True") as session:
        for _ in range(setup.repeats(3, 2) + 1):
            began = time.perf_counter()
            run = session.run(_tap_often, _tap_often, args=(count,))
            frame = run.frame
            rates.append(count / (time.perf_counter() - began))
            assert len(frame) == count, f"{count - len(frame)} of {count} rows are lost"
    return [Line("rows", "rows of small taps into the frame", "rows/s", Spread.of(rates[1:]))]


def _tap_often(count: int) -> None:
    torch.set_num_threads(1)
    value = torch.randn(16)
    for index in range(count):
        gl.tap("x", value, layer=index % 32)
        if index % 1000 == 999:
            gl.step()


def _as_fast_as_they_come(setup: Setup) -> list[Line]:
    """Measure rows that a rank sends without taps: through its channel, the store and the file, to the frame."""
    count = 5000 if setup.quick else 50_000
    arrival, rates, pauses = [], [], []
    with worlds.session(setup) as session:
        idle = _longest_pause(session, wanted=1, limit=0.5)
        for _ in range(setup.repeats(3, 2) + 1):
            wanted = session.row_count + count
            began = time.perf_counter()
            run = session.start(target=_send_rows_of(count, run=len(session.runs)))
            pauses.append(_longest_pause(session, wanted))
            arrival.append(count / (time.perf_counter() - began))
            frame = run.wait().frame
            rates.append(count / (time.perf_counter() - began))
            assert sorted(frame["order"]) == list(range(count)), f"{len(frame)} of {count} rows in the frame"
    return [
        Line("rows", "rows from a rank to the notebook", "rows/s", Spread.of(arrival[1:])),
        Line(
            "rows",
            "rows from a rank into the frame",
            "rows/s",
            Spread.of(rates[1:]),
            budgets=(Budget("figure", "at least", 100_000),),
            note="none lost",
            in_docs=True,
        ),
        Line(
            "rows",
            "longest pause of the notebook meanwhile",
            "s",
            Spread.of(pauses[1:]),
            note=f"between ticks of 1 ms; {quantity(idle, 's')} when idle",
        ),
    ]


def _send_rows_of(count: int, run: int) -> Callable[[], None]:
    def send_rows() -> None:
        grafter = active.grafter()
        assert grafter is not None
        rest: list[Any]
        _, step, _, name, tags, *rest = a_row()
        # Steps continue over the runs of a session.
        step += run
        tags = {**tags, "step": step}
        for order in range(count):
            grafter._reporter.row(Row(run, step, order, name, tags, *rest))

    return send_rows


def a_row(layer: int = 3) -> Row:
    """Make the row of a compared tap, with every statistic."""
    value = torch.randn(16)
    name = f"model.layers.{layer}.mlp"
    tags = {"name": name, "step": _STEP, "side": "target", "rank": 0, "layer": layer}
    # Differences like float32's rounding, so that every row has different statistics.
    statistics = asdict(diffs.measure(value, value * (1 + 1e-6) + 1e-7 * torch.randn(16)))
    return Row(
        run=0,
        step=_STEP,
        order=0,
        name=name,
        tags=tags,
        direction="b2t",
        side="target",
        rank=0,
        status="compared",
        senders=[0],
        shape=[16],
        dtype="float32",
        baseline_name=name,
        target_name=name,
        seconds=1e-4 * float(value[0].abs()),
        **statistics,
    )


def _longest_pause(session: gl.Session, wanted: int, limit: float = 600.0) -> float:
    """Measure the longest time between two ticks on this thread, until ``wanted`` rows or ``limit`` seconds."""
    longest = 0.0
    began = last = time.perf_counter()
    while session.row_count < wanted and last - began < limit:
        time.sleep(_TICK)
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest


def _large_frames(setup: Setup) -> list[Line]:
    """Measure the frame of a session with very many rows, the frame after some more, and the rows on disk."""
    count, more = (10_000, 1000) if setup.quick else (1_000_000, 10_000)
    sample = SampleRows()
    with worlds.session(setup) as session:
        sample.send(session, count)
        # Rows that came at once are decoded and moved at some 200,000 a second; a frame reads them from their files.
        while (session.folder / "rows.jsonl").stat().st_size > 4 << 20:
            time.sleep(0.1)
        began = time.perf_counter()
        frame = session.frame
        built = time.perf_counter() - began
        assert len(frame) == count
        del frame
        appended = []
        for index in range(setup.repeats(3, 2)):
            sample.send(session, more)
            began = time.perf_counter()
            frame = session.frame
            appended.append(time.perf_counter() - began)
            assert len(frame) == count + (index + 1) * more
            del frame
        rows, folder = session.row_count, session.folder
    size = sum(file.stat().st_size for file in folder.glob("rows[.-]*"))
    loads = seconds(lambda: gl.load_run(folder), setup.repeats(3, 1), warm_up=0)
    on_disk = Line(
        "rows",
        "a row on disk, when its session is over",
        "B",
        Spread.of([size / rows]),
        budgets=(Budget("figure", "at most", 100),),
        in_docs=True,
    )
    return [
        _judged(f"frame of {count:,} rows", [built], 1.0),
        _judged(f"the frame again after {more:,} more", appended, 0.05),
        _judged(f"gl.load_run of {rows:,} rows", loads, 1.0),
        on_disk,
    ]


def _judged(name: str, taken: Sequence[float], limit: float) -> Line:
    return Line("rows", name, "s", Spread.of(taken), budgets=(Budget("figure", "at most", limit),), in_docs=True)


class SampleRows:
    """Rows of many steps of one model: each step has the same taps with different values."""

    def __init__(self) -> None:
        self._parts = []
        for at in range(200 * _TAPS):
            line = encode(a_row(at % _TAPS)._replace(order=_ORDER))
            before, between, after = line.split(b"%d" % _STEP)
            self._parts.append((before, *between.split(b"%d" % _ORDER), after))
        self._count = 0

    def send(self, session: gl.Session, count: int) -> None:
        """Pass rows to the session as its hub does, a thousand at once."""
        for start in range(self._count, self._count + count, 1000):
            lines = []
            for at in range(start, start + 1000):
                begin, before, between, after = self._parts[at % len(self._parts)]
                step = at // _TAPS
                lines.append(b"%s%d%s%d%s%d%s" % (begin, step, before, at % _TAPS, between, step, after))
            internals_of(session).reports.on_rows(lines)
        self._count += count
