"""All taps through time: a heat map of taps over steps, with the step at which each first diverged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from graftlab.plots import style
from graftlab.plots.scales import EXACT, ODD, color_bar, log_image
from graftlab.plots.style import Array
from graftlab.verdict.order import Taps, group
from graftlab.verdict.summary import floor_of

_MOST = 240
"""Cells along an axis; past that neighbours share one, and show their maximum."""


def over_steps(
    frame: pd.DataFrame, *, value: str = "rel_l2", noise_floor: float | None = None, ax: Axes | None = None
) -> Figure:
    """Every tap over every step: when did which tap begin to differ, and does it come and go?

    A column that is bright is a step that went wrong everywhere; a row that turns bright is a tap whose error grows.

    - x: steps. y: taps in execution order, the first one on top; where there are more than 240, neighbours share a cell
      and show their maximum. Colour: ``value``, log scale, the largest over the receiving ranks.
    - black is exactly 0, vermillion a value that is not finite or differs in being so; blank is a tap that was not
      measured in that step.
    - a ring: the step at which a tap was first above ``noise_floor`` (by default the one assumed for the frame's
      dtypes). The first of all is named in the title.

    Raises ValueError naming a column (name, order, status or ``value``) that the frame lacks.

    >>> figure = gl.plots.over_steps(run.frame)
    """
    figure, ax = style.new_axes(ax, 9.0, 6.0)
    style.label_axes(ax, "step", "tap, in execution order")
    if isinstance(frame, pd.DataFrame) and frame.empty:
        style.say(ax, "no rows to show: nothing was compared or grafted yet")
        return figure
    taps = group(frame, value)
    floor, in_words = floor_of(frame, noise_floor)
    # In the order in which taps first ran, whichever step that was in.
    places: dict[Any, int] = {}
    for key in taps.keys:
        places.setdefault((key[0], *key[2:]), len(places))
    y = np.array([places[(key[0], *key[2:])] for key in taps.keys])
    x = np.array([int(str(key[1])) for key in taps.keys])
    grafted = taps.statuses.get("grafted", np.zeros(len(y), dtype=bool))
    odd = taps.measured & (taps.nonfinite > 0)
    grid = np.full((len(places), len(taps.steps)), -np.inf)
    shown = np.where(odd, np.nan, np.abs(taps.value))
    measured = taps.measured
    grid[y[measured], x[measured]] = shown[measured]

    tall, wide = (-(-count // _MOST) or 1 for count in grid.shape)
    drawn = _draw(figure, ax, _shrunk(grid, tall, wide), style.value_label(value, short=True))
    suspects = taps.suspects(floor) & ~grafted
    first = pd.DataFrame({"y": y[suspects], "x": x[suspects]}).groupby("y")["x"].min()
    if len(first):
        look = style.Mark(style.VERMILLION, "o")
        style.marks(
            ax,
            first.to_numpy() // wide,
            first.index.to_numpy() // tall,
            look,
            face="none",
            edge=style.VERMILLION,
            size=36.0,
            above=5,
            gid="first divergent step",
        )
        drawn.append(style.key("first above the floor", style.VERMILLION, "o", hollow=True))
    _label(ax, [_name(tap, taps.tag_columns) for tap in places], taps.steps, tall, wide)
    style.head(ax, _said(taps, suspects, in_words))
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


def _name(tap: tuple[Any, ...], columns: list[str]) -> str:
    name, occurrence, *tags = tap
    parts = [style.shorten(str(name), 34), *(f"#{occurrence}" for _ in range(bool(occurrence)))]
    own = [(column, tag) for column, tag in zip(columns, tags, strict=True) if tag is not None]
    shown = [f"{column}={style.shorten(str(tag), 12)}" for column, tag in own if tag != "original"]
    return " ".join([*parts, *shown])


def _said(taps: Taps, suspects: Array, floor: str) -> str:
    if not suspects.any():
        return f"no tap is above {floor} in {len(taps.steps)} steps"
    key = taps.keys[int(suspects.argmax())]
    name, step = _name((key[0], *key[2:]), taps.tag_columns), taps.steps[int(str(key[1]))]
    return f"first divergent: {name} in step {step} ({floor})"
