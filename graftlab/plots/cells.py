"""A figure of taps over steps: what each cell shows, and where each tap first diverged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from graftlab.plots import style
from graftlab.plots.scales import EXACT, ODD, color_bar, log_image
from graftlab.plots.style import Array

_MOST = 240
"""Cells along an axis; past that neighbours share one, and show their maximum."""


@dataclass(frozen=True)
class Cells:
    """What is drawn where: an entry each a tap and step; several of one cell show their maximum."""

    names: list[str]
    steps: list[Any]
    y: Array
    x: Array
    value: Array
    apart: Array
    measured: Array
    grafted: Array
    differs: Array


def draw_cells(figure: Figure, ax: Axes, cells: Cells, value: str, floor: float, in_words: str) -> Figure:
    """Draw them; ``in_words`` is what the floor is called."""
    y, x, measured = cells.y, cells.x, cells.measured
    grid = np.full((len(cells.names), len(cells.steps)), -np.inf)
    odd = measured & cells.differs
    # What is not finite wins its cell.
    np.fmax.at(grid, (y[measured], x[measured]), cells.value[measured])
    grid[y[odd], x[odd]] = np.nan
    without = measured & np.isnan(cells.value) & np.isneginf(grid[y, x])
    grid[y[without], x[without]] = np.nan
    tall, wide = (-(-count // _MOST) or 1 for count in grid.shape)
    drawn = _draw(figure, ax, _shrunk(grid, tall, wide), style.value_label(value, short=True))
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
    style.head(ax, _said(cells, first, in_words))
    style.legend_below(ax, drawn)
    return figure


def _shrunk(grid: Array, tall: int, wide: int) -> Array:
    """The maximum of each ``tall`` x ``wide`` block; NaN wins, and what is blank in all of it stays blank."""
    rows, columns = grid.shape
    padded = np.pad(grid, ((0, -rows % tall), (0, -columns % wide)), constant_values=-np.inf)
    blocks = padded.reshape(padded.shape[0] // tall, tall, padded.shape[1] // wide, wide)
    largest: Array = blocks.max(axis=(1, 3))
    return largest


def _draw(figure: Figure, ax: Axes, grid: Array, label: str) -> list[Any]:
    empty = np.isneginf(grid)
    image, norm, cmap = log_image(np.where(empty, 0.0, grid))
    # What is masked is either blank or not finite: the second is drawn over the first.
    blank = cmap.with_extremes(under=EXACT, bad=(0, 0, 0, 0))
    image.mask |= empty
    drawn = ax.imshow(image, norm=norm, cmap=blank, aspect="auto", interpolation="nearest", gid="cells")
    odd = ~empty & ~np.isfinite(grid)
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


def tap_label(tap: tuple[Any, ...], columns: list[str]) -> str:
    """What a line is called, from the tap's name, its occurrence and the values of these tags."""
    name, occurrence, *tags = tap
    parts = [style.shorten(str(name), 34), *(f"#{occurrence}" for _ in range(bool(occurrence)))]
    own = [(column, tag) for column, tag in zip(columns, tags, strict=True) if tag is not None]
    shown = [f"{column}={style.shorten(str(tag), 12)}" for column, tag in own if tag != "original"]
    return " ".join([*parts, *shown])


def _said(cells: Cells, first: Array, floor: str) -> str:
    step = int(first.min())
    if step == len(cells.steps):
        return f"no tap is above {floor} in {len(cells.steps)} steps"
    return f"first divergent: {cells.names[int(first.argmin())]} in step {cells.steps[step]} ({floor})"
