"""The divergence figure: every tap of one or several runs, in the order in which they ran."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from graftlab.plots import style
from graftlab.plots.scales import ValueAxis, value_axis
from graftlab.plots.style import Array
from graftlab.rows.schema import MEASURED
from graftlab.verdict.order import Key, Taps, group, merge, require_floor

MAX_LABELS = 60
MAX_SLANTED = 32
# Characters of tick size that fit side by side below a figure.
_LEVEL_CHARACTERS = 64
_MAX_STEP_LINES = 60
Frames = pd.DataFrame | Sequence[pd.DataFrame] | Mapping[str, pd.DataFrame]


def divergence(
    frames: Frames,
    *,
    value: str = "rel_l2",
    noise_floor: float | None = None,
    labels: Sequence[str] | None = None,
    suspect: bool = True,
    ax: Axes | None = None,
) -> Figure:
    """How far the two sides are apart at every tap, in execution order: read it from the left.

    A healthy pair stays near or below the noise floor, slowly rising. The first tap that jumps above it and was
    not grafted is the place to look; it is annotated as the first divergent one, and everything to its right may
    only inherit its error.

    - x: one position per tap (and step), in the order in which they ran, labelled by name and by the tags that
      distinguish taps with the same name; with more than 60 taps only some are labelled.
    - y: ``value`` on a log scale, the largest over the receiving ranks. Hollow points on ``0 (exact)``
      agree to the bit.
    - colour and marker: the status. Failed and timed-out taps are at the top edge, missing and unmatched
      ones at the bottom edge, even if other ranks measured the same tap. A non-finite value is at the top.
    - a large ring: a NaN or an infinity on one side only.

    ``frames`` is a frame of rows, a list of frames, or a dict from label to frame. Several runs are aligned by
    tap, with steps counted from each run's first, and each run has its colour. ``labels`` names the runs of a
    list. ``noise_floor`` is in the unit of ``value``; without one, only failed taps and non-finite differences
    count as divergent. ``suspect=False`` omits the annotation.

    Raises ValueError naming a column (name, order, status or ``value``) that a frame lacks, or when
    ``labels`` does not fit ``frames``.

    >>> figure = gl.plots.divergence(run.frame, noise_floor=1e-5)
    >>> figure = gl.plots.divergence({"before": run.frame, "after": run.frame})
    """
    require_floor(noise_floor)
    runs, names = _lay_out(_label_frames(frames, labels), value)
    count = len(names.keys)
    every = -(-count // MAX_LABELS) or 1
    ticks = {x: style.plain(names[x]) for x in range(0, count, every)}
    longest = max(map(len, ticks.values()), default=0)
    height = 3.6 + longest * (0.06 if len(ticks) > MAX_SLANTED else 0.045)  # inches of an upright or slanted label
    figure, ax = style.new_axes(ax, style.width_for(count), height)
    thinned = "" if every == 1 else f" (one in {every} named)"
    style.label_axes(ax, f"tap, in execution order{thinned}", style.value_label(value))
    if not count:
        style.say(ax, "no rows to show: nothing was compared or grafted yet")
        return figure

    edges = {style.look(s).edge for run in runs for s in run.taps.statuses if s not in MEASURED}
    measured = np.concatenate([_drawn_values(run.taps)[run.taps.measured] for run in runs])
    scale = value_axis(measured, marks=[noise_floor], top="top" in edges, bottom="bottom" in edges)
    scale.apply(ax)
    _label_taps(ax, names, ticks)
    if noise_floor is not None:
        ax.axhline(
            noise_floor,
            color=style.ink(),
            linestyle=(0, (6, 3)),
            linewidth=1.0,
            zorder=1.5,
            gid="noise floor",
        )
    for run in runs:
        _draw_run(ax, run, scale, several=len(runs) > 1, size=46.0 if count <= 60 else 24.0 if count <= 300 else 9.0)
    if suspect:
        _annotate_suspects(ax, runs, names, scale, value, noise_floor)
    style.legend(ax, _legend(runs, noise_floor))
    return figure


@dataclass(frozen=True)
class _RunSeries:
    """The taps of one run, their x positions, and the run's colour and line style."""

    label: str
    taps: Taps
    keys: list[Key]
    x: Array
    color: str
    line: str


def _drawn_values(taps: Taps) -> Array:
    """The values to draw: equal finite elements beside differing NaNs are not exact, so they are drawn as NaN."""
    shown: Array = np.where((taps.nonfinite > 0) & (taps.value == 0), np.inf, taps.value)
    return shown


def _label_frames(frames: Frames, labels: Sequence[str] | None) -> dict[str, pd.DataFrame]:
    if isinstance(frames, pd.DataFrame):
        frames = [frames]
    listed = list(frames.values()) if isinstance(frames, Mapping) else list(frames)
    default = list(frames) if isinstance(frames, Mapping) else [f"run {i + 1}" for i in range(len(listed))]
    chosen = [str(label) for label in (default if labels is None else labels)]
    if len(chosen) != len(listed):
        raise ValueError(f"{len(chosen)} labels were given for {len(listed)} frames")
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"the labels {chosen} are not all different")
    return dict(zip(chosen, listed, strict=True))


def _lay_out(frames: Mapping[str, pd.DataFrame], value: str) -> tuple[list[_RunSeries], _TapNames]:
    tables: dict[str, Taps] = {}
    for label, frame in frames.items():
        if not isinstance(frame, pd.DataFrame) or len(frame):
            tables[label] = group(frame, value)
    columns = list(dict.fromkeys(column for taps in tables.values() for column in taps.tag_columns))
    keys = {label: _aligned_keys(taps, columns) for label, taps in tables.items()}
    steps = [taps.steps for taps in tables.values()]
    same_steps = all(numbers == steps[0] for numbers in steps)
    names = _TapNames(merge(list(keys.values())), columns, steps[0] if steps and same_steps else None)
    runs = []
    for number, (label, taps) in enumerate(tables.items()):
        # Side by side, so that equal values of two runs do not hide each other.
        dodge = 0.16 * (number - (len(tables) - 1) / 2) if 1 < len(tables) <= 4 else 0.0
        x = np.array([names.place[key] for key in keys[label]], dtype=np.float64) + dodge
        color, line = style.LINES[number % len(style.LINES)]
        runs.append(_RunSeries(label, taps, keys[label], x, color, line))
    return runs, names


def _aligned_keys(taps: Taps, columns: Sequence[str]) -> list[Key]:
    """Extend keys to the tags of all runs, with None for tags that this run does not have."""
    if taps.tag_columns == list(columns):
        return taps.keys
    at = [3 + taps.tag_columns.index(c) if c in taps.tag_columns else None for c in columns]
    return [(*key[:3], *(None if i is None else key[i] for i in at)) for key in taps.keys]


class _TapNames:
    """The labels on the x axis: names, with the tags that distinguish taps of the same name."""

    def __init__(self, keys: Sequence[Key], columns: Sequence[str], steps: Sequence[Any] | None) -> None:
        self.keys = keys
        self.place = {key: x for x, key in enumerate(keys)}
        self.columns = ["name", "step", "occurrence", *columns]
        self.steps = steps  # None if the runs have different steps; steps then count from each run's first
        # A tag distinguishes taps if some name occurs with two of its values.
        values: dict[tuple[int, Hashable], Hashable] = {}
        shown = set()
        for key in self.keys:
            for i in range(1, len(key)):
                if i not in shown and values.setdefault((i, key[0]), key[i]) != key[i]:
                    shown.add(i)
        self.shown = sorted(shown)

    def __getitem__(self, x: int) -> str:
        key = self.keys[x]
        parts = [style.shorten(str(key[0]), 40)]
        for i in sorted(self.shown, key=lambda i: (i < 3, i)):  # tags before step and occurrence
            if i == 1:
                step = key[1]
                parts.append(f"step +{step}" if self.steps is None else f"step={self.steps[int(str(step))]}")
            elif i == 2:
                parts.append(f"#{key[2]}")
            elif key[i] is not None:
                parts.append(f"{style.shorten(self.columns[i], 16)}={style.shorten(str(key[i]), 16)}")
        return " ".join(parts)


def _label_taps(ax: Axes, names: _TapNames, ticks: Mapping[int, str]) -> None:
    count = len(names.keys)
    upright = len(ticks) > MAX_SLANTED
    # Slanted text is harder to read, and a slanted "x" looks like a "+".
    level = all((len(name) + 2) * count <= _LEVEL_CHARACTERS for name in ticks.values())
    ax.set_xlim(-0.8, count - 0.2)
    ax.set_xticks(list(ticks), list(ticks.values()), fontsize=style.DENSE if upright else style.TICK, va="top")
    for label in ax.get_xticklabels():
        label.set(rotation=0 if level else 90 if upright else 45, ha="center" if upright or level else "right")
        label.set_rotation_mode("default" if upright or level else "anchor")
    starts = [x for x in range(1, count) if names.keys[x][1] != names.keys[x - 1][1]]
    if len(starts) <= _MAX_STEP_LINES:
        for x in starts:
            ax.axvline(x - 0.5, color=style.GREY, alpha=0.45, linewidth=0.8, linestyle=":", zorder=1)


def _draw_run(ax: Axes, run: _RunSeries, scale: ValueAxis, *, several: bool, size: float) -> None:
    taps = run.taps
    measured, value = taps.measured, _drawn_values(taps)
    exact = (value == 0) & scale.log
    y = scale.place(value)
    height = np.where(measured & np.isfinite(value) & ~exact, y, np.nan)
    gaps = np.flatnonzero(np.diff([key[1] for key in run.keys])) + 1  # lines do not connect steps
    (line,) = ax.plot(
        np.insert(run.x, gaps, np.nan), np.insert(height, gaps, np.nan), color=run.color, gid=f"{run.label}: line"
    )
    line.set(linestyle=run.line if several else "-", linewidth=1.2, alpha=0.75 if several else 0.35, zorder=2)

    def mark(mask: Array, at: Array, status: str, *, hollow: bool = False) -> None:
        look = style.look(status)
        color = run.color if several and status == "compared" else look.color
        edge = color if hollow else run.color if several else style.ink()
        style.marks(
            ax,
            run.x[mask],
            at[mask],
            look,
            face="none" if hollow else color,
            edge=edge,
            size=size,
            width=1.2 if hollow else 1.0 if several else 0.4 if size > 10 else 0.0,
            above=3 + (status != "compared"),
            gid=f"{run.label}: {status}{' exact' if hollow else ''}",
        )

    nowhere = np.zeros_like(measured)
    for status in MEASURED:
        mask = taps.statuses.get(status, nowhere)
        if status == "compared":  # a tap that any rank grafted is drawn as grafted
            mask = mask & ~taps.statuses.get("grafted", nowhere)
        mark(mask & ~exact, y, status)
        mark(mask & exact, y, status, hollow=True)
    for other, mask in taps.statuses.items():
        if other not in MEASURED:
            mark(mask, np.full(len(y), scale.edge(style.look(other).edge)), other)
    odd = measured & (taps.nonfinite > 0)
    style.rings(ax, run.x[odd], y[odd], size=max(size * 4.5, 90.0), gid=f"{run.label}: non-finite")


def _annotate_suspects(
    ax: Axes, runs: Sequence[_RunSeries], names: _TapNames, scale: ValueAxis, value: str, noise_floor: float | None
) -> None:
    level = 0
    for run in reversed(runs):
        found = np.flatnonzero(run.taps.suspects(noise_floor))
        if not found.size:
            continue
        at = int(found[0])
        taps = run.taps
        failed = "failed" in taps.statuses and bool(taps.statuses["failed"][at])
        above = noise_floor is not None and taps.measured[at] and taps.value[at] > noise_floor
        reasons = [f"{style.value_name(value)} {style.number(taps.value[at])}"] if above else []
        reasons += ["non-finite values differ"] if taps.nonfinite[at] > 0 else []
        reasons += ["failed"] if failed else []
        who = f"{run.label}, " if len(runs) > 1 else ""
        name = names[names.place[run.keys[at]]]
        at_edge = failed and not above and not taps.nonfinite[at] > 0
        y = scale.top if at_edge else float(scale.place(_drawn_values(taps)[at : at + 1])[0])
        share = float(run.x[at] + 0.8) / (len(names.keys) + 0.6)
        note = f"{who}first divergent: {name}  ({', '.join(reasons)})"
        at_point, color = (float(run.x[at]), y), run.color if len(runs) > 1 else None
        style.point_out(ax, note, at_point, share=share, level=level, color=color)
        level += 1


def _legend(runs: Sequence[_RunSeries], noise_floor: float | None) -> list[Line2D]:
    several = len(runs) > 1
    entries = [style.key(run.label, run.color, "o", run.line) for run in runs] if several else []
    present = {status for run in runs for status in run.taps.statuses}
    for status in [*(s for s in style.MARKS if s in present), *sorted(present - set(style.MARKS))]:
        grey = several and status == "compared"  # because each run has its own colour
        entries.append(style.key(status, style.GREY, "o") if grey else style.status_key(status))
    if any(((_drawn_values(run.taps) == 0) & run.taps.measured).any() for run in runs):
        entries.append(style.key("exact (hollow)", style.GREY, "o", hollow=True))
    if any(((run.taps.nonfinite > 0) & run.taps.measured).any() for run in runs):
        entries.append(style.ring_key())
    if noise_floor is not None:
        entries.append(style.key(f"noise floor {noise_floor:.3g}", style.ink(), line="--"))
    return entries
