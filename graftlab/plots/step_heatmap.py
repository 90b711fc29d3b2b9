"""The heat map of taps over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from graftlab.plots import style
from graftlab.plots.scales import EXACT, ODD, color_bar, draw_cells
from graftlab.plots.style import Array
from graftlab.verdict.facts import Facts
from graftlab.verdict.order import group, is_lost
from graftlab.verdict.summary import floor_of


def over_steps(
    frame: pd.DataFrame, *, value: str = "rel_l2", noise_floor: float | None = None, ax: Axes | None = None
) -> Figure:
    """Every tap over every step: when did each tap begin to differ, and does the difference come and go?

    A bright column is a step with errors everywhere; a row that turns bright is a tap whose error grows.

    - x: steps. y: taps in execution order, the first one on top; with more than 240, neighbours share a cell and show
      their maximum. Colour: ``value``, log scale, the largest over the receiving ranks.
    - black is exactly 0, vermillion a non-finite value or a non-finite element on one side only; blank is a tap that
      was not measured in that step.
    - a ring: the step at which a tap was first above ``noise_floor`` (by default the one assumed for the frame's
      dtypes). The title names the first of all, and counts the taps that were not compared.

    Raises ValueError naming a column (name, order, status or ``value``) that the frame lacks.

    >>> figure = gl.plots.over_steps(run.frame)
    """
    figure, ax = style.new_axes(ax, 9.0, 6.0)
    style.label_axes(ax, "step", "tap, in execution order")
    if isinstance(frame, pd.DataFrame) and frame.empty:
        style.say(ax, "no rows to show: nothing was compared or grafted yet")
        return figure
    taps = group(frame, value)
    # In the order in which taps first ran, in any step.
    places: dict[Any, int] = {}
    for key in taps.keys:
        places.setdefault((key[0], *key[2:]), len(places))
    cells = HeatmapCells(
        names=[_tap_label(tap, taps.tag_columns) for tap in places],
        steps=taps.steps,
        y=np.array([places[(key[0], *key[2:])] for key in taps.keys]),
        x=np.array([int(str(key[1])) for key in taps.keys]),
        value=np.abs(taps.value),
        apart=np.abs(taps.apart),
        measured=taps.measured,
        grafted=taps.statuses.get("grafted", np.zeros(len(taps.keys), dtype=bool)),
        differs=taps.nonfinite > 0,
    )
    lost = ", ".join(f"{mask.sum():,} {status}" for status, mask in taps.statuses.items() if is_lost(status))
    return _draw_heatmap(figure, ax, cells, value, *floor_of(Facts(frame), noise_floor), lost)


_MOST = 240
"""Cells along an axis; beyond that, neighbours share one and show their maximum."""


@dataclass(frozen=True)
class HeatmapCells:
    """The data of the heat map, one entry per measurement. A cell shows the maximum of its entries."""

    names: list[str]
    steps: list[Any]
    y: Array
    x: Array
    value: Array
    apart: Array
    measured: Array
    grafted: Array
    differs: Array


def _draw_heatmap(
    figure: Figure, ax: Axes, cells: HeatmapCells, value: str, floor: float, in_words: str, lost: str
) -> Figure:
    """Draw the cells; ``in_words`` describes the floor, and ``lost`` what has no cell."""
    y, x, measured = cells.y, cells.x, cells.measured
    grid = np.full((len(cells.names), len(cells.steps)), -np.inf)
    odd = measured & cells.differs
    # A non-finite value wins its cell.
    np.fmax.at(grid, (y[measured], x[measured]), cells.value[measured])
    grid[y[odd], x[odd]] = np.nan
    without = measured & np.isnan(cells.value) & np.isneginf(grid[y, x])
    grid[y[without], x[without]] = np.nan
    tall, wide = (-(-count // _MOST) or 1 for count in grid.shape)
    drawn = _draw_image(figure, ax, _downsample(grid, tall, wide), style.value_label(value, short=True))
    with np.errstate(invalid="ignore"):
        suspects = measured & ~cells.grafted & ((cells.apart > floor) | cells.differs)
    first = np.full(len(cells.names), len(cells.steps))
    np.minimum.at(first, y[suspects], x[suspects])
    hit = np.flatnonzero(first < len(cells.steps))
    if len(hit):
        look = style.Mark(style.VERMILLION, "o")
        style.marks(
            ax,
            first[hit] // wide,
            hit // tall,
            look,
            face="none",
            edge=style.VERMILLION,
            size=36.0,
            above=5,
            gid="first divergent step",
        )
        drawn.append(style.key("first above the floor", style.VERMILLION, "o", hollow=True))
    _label(ax, cells.names, cells.steps, tall, wide)
    style.head(ax, _conclusion(cells, first, in_words), f"not compared: {lost}" if lost else "")
    style.legend_below(ax, drawn)
    return figure


def _downsample(grid: Array, tall: int, wide: int) -> Array:
    """The maximum of each ``tall`` x ``wide`` block; NaN wins, and a block of blank cells stays blank."""
    rows, columns = grid.shape
    padded = np.pad(grid, ((0, -rows % tall), (0, -columns % wide)), constant_values=-np.inf)
    blocks = padded.reshape(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
    largest: Array = blocks.max(axis=(1, 3))
    return largest


def _draw_image(figure: Figure, ax: Axes, grid: Array, label: str) -> list[Any]:
    drawn, odd = draw_cells(ax, grid)
    keys: list[Any] = []
    if odd.any():
        red = np.zeros((*grid.shape, 4))
        red[odd] = (0.835, 0.369, 0.0, 1.0)
        ax.imshow(red, aspect="auto", interpolation="nearest", gid="not finite")
        keys.append(Patch(facecolor=ODD, label="not finite"))
    color_bar(figure, drawn, ax, label)
    if (grid == 0).any():
        keys.append(Patch(facecolor=EXACT, edgecolor=style.GREY, label="0 (exact)"))
    return keys


def _label(ax: Axes, names: list[str], steps: list[Any], tall: int, wide: int) -> None:
    every = -(-len(names) // (30 * tall)) or 1
    rows = range(0, -(-len(names) // tall), every)
    ax.set_yticks(list(rows), labels=[style.plain(names[row * tall]) for row in rows], fontsize=style.TICK)
    every = -(-len(steps) // (14 * wide)) or 1
    columns = range(0, -(-len(steps) // wide), every)
    ax.set_xticks(list(columns), labels=[str(steps[column * wide]) for column in columns], fontsize=style.TICK)


def _tap_label(tap: tuple[Any, ...], columns: list[str]) -> str:
    """The label of a line: the tap's name, its occurrence and the values of these tags."""
    name, occurrence, *tags = tap
    parts = [style.shorten(str(name), 34), *(f"#{occurrence}" for _ in range(bool(occurrence)))]
    own = [(column, tag) for column, tag in zip(columns, tags, strict=True) if tag is not None]
    shown = [f"{column}={style.shorten(str(tag), 12)}" for column, tag in own if tag != "original"]
    return " ".join([*parts, *shown])


def _conclusion(cells: HeatmapCells, first: Array, floor: str) -> str:
    step = int(first.min())
    if step == len(cells.steps):
        return f"no tap is above {floor} in {len(cells.steps)} steps"
    return f"first divergent: {cells.names[int(first.argmin())]} in step {cells.steps[step]} ({floor})"
