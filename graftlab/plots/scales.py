"""A y axis and a colour scale for values over many decades, with zeros, NaN and missing values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator

from graftlab.plots import style
from graftlab.plots.style import GREY, Array

# EXACT is darker than the colour map, so that zero, small and large look ordered.
EXACT, ODD = "#101010", style.VERMILLION


@dataclass(frozen=True)
class ValueAxis:
    """A y axis with extra positions outside its scale for exact zeros and for rows without a value.

    The axis is logarithmic unless a value is negative. An exact zero is shown below the smallest decade, at a
    separate tick.
    """

    log: bool
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    low: float
    high: float
    zero: float
    top: float
    bottom: float
    limits: tuple[float, float]
    bands: tuple[tuple[float, float], ...]

    def place(self, values: Array) -> Array:
        """y coordinates: zeros at the floor, NaN and infinities at the top edge."""
        shown = np.clip(values, self.low, self.high)
        if self.log:
            shown = np.where(values == 0, self.zero, shown)
        return np.where(np.isfinite(values), shown, self.top)

    def edge(self, name: str) -> float:
        return self.top if name == "top" else self.bottom

    def apply(self, ax: Axes) -> None:
        ax.set_yscale("log" if self.log else "linear")
        ax.set_ylim(self.limits)
        ax.yaxis.set_major_locator(FixedLocator(self.ticks))
        ax.yaxis.set_major_formatter(FixedFormatter(self.labels))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.6)
        ax.set_axisbelow(True)
        for bottom, top in self.bands:
            ax.axhspan(bottom, top, color=GREY, alpha=0.1, linewidth=0)


def value_axis(
    values: Array, *, marks: Sequence[float | None] = (), top: bool = False, bottom: bool = False
) -> ValueAxis:
    """Lay out an axis for ``values`` (NaN and infinities allowed) and for ``marks``, such as a noise floor.

    ``top`` and ``bottom`` reserve an edge for rows without a value; non-finite values reserve the top.
    """
    at_top = "no value" if top else "not finite"
    extra = np.array([m for m in marks if m is not None], dtype=np.float64)
    finite = np.concatenate([values[np.isfinite(values)], extra[np.isfinite(extra)]])
    top = top or not bool(np.isfinite(values).all())
    log = not bool((finite < 0).any())
    zeros = log and bool((values == 0).any())
    if log:
        positive = finite[finite > 0].clip(1e-180, 1e180)  # leaves float64 range for the edges
        first = math.floor(math.log10(positive.min()) + 1e-9) if positive.size else -8
        last = math.ceil(math.log10(positive.max()) - 1e-9) if positive.size else 0
        last = max(last, first + 1)
        exponents = range(last, first - 1, -math.ceil((last - first) / 8))[::-1]
        low, high = float(first), float(last)
        at, labels = [float(e) for e in exponents], [style.power(10.0**e) for e in exponents]
    else:
        low, high = float(finite.min()), float(finite.max())
        if low == high:
            low, high = low - 0.5, high + 0.5
        at = [float(t) for t in MaxNLocator(7).tick_values(low, high) if low <= t <= high]
        labels = [f"{t:g}" for t in at]
    pad = max(0.08 * (high - low), 0.4 if log else 0.0)
    zero = low - pad * 1.5 if zeros else low
    bottom_at = zero - pad * 1.5
    top_at = high + pad * 1.5
    floor = (bottom_at if bottom else zero if zeros else low) - pad * 0.8
    ceiling = (top_at if top else high) + pad * 0.8
    for shown, place, text in (
        (zeros, zero, "0 (exact)"),
        (bottom, bottom_at, "no value"),
        (top, top_at, at_top),
    ):
        if shown:
            at.append(place)
            labels.append(text)

    def scale(place: float) -> float:
        return 10.0**place if log else place

    bands = [(scale(floor), scale(low - pad * 0.6))] if zeros or bottom else []
    bands += [(scale(high + pad * 0.6), scale(ceiling))] if top else []
    return ValueAxis(
        log=log,
        ticks=tuple(scale(place) for place in at),
        labels=tuple(labels),
        low=scale(low),
        high=scale(high),
        zero=scale(zero) if log else 0.0,
        top=scale(top_at),
        bottom=scale(bottom_at),
        limits=(scale(floor), scale(ceiling)),
        bands=tuple(bands),
    )


def log_image(grid: Array) -> tuple[Any, LogNorm, Colormap]:
    """A grid of non-negative values for ``imshow``: zeros take the colour EXACT, NaN and infinities ODD.

    Colours distinguish eight decades below the largest value; smaller values get the lowest colour, never EXACT. The
    scale spans at least a factor of 2, so that values that differ by rounding look alike.
    """
    usable = grid[np.isfinite(grid) & (grid > 0)].astype(np.float64)
    high = float(usable.max()) if usable.size else 1.0
    low = max(float(usable.min()), high * 1e-8) if usable.size else 0.1
    low = min(low, high / 2)
    shown = np.where(grid > 0, np.clip(grid.astype(np.float64), low, high), low / 10)
    shown = np.ma.masked_array(shown, mask=~np.isfinite(grid))
    return shown, LogNorm(low, high), colormaps["viridis"].with_extremes(under=EXACT, bad=ODD)


def draw_cells(ax: Axes, grid: Array) -> tuple[Any, Array]:
    """Draw a `log_image` without the cells that are -inf, which have no value, and without those that are not finite.

    Returns the image, and which cells are not finite, for the caller to draw.
    """
    empty = np.isneginf(grid)
    image, norm, cmap = log_image(np.where(empty, 0.0, grid))
    image.mask |= empty
    blank = cmap.with_extremes(under=EXACT, bad=(0, 0, 0, 0))
    drawn = ax.imshow(image, norm=norm, cmap=blank, aspect="auto", interpolation="nearest", gid="cells")
    return drawn, ~empty & ~np.isfinite(grid)


def color_bar(figure: Figure, drawn: Any, ax: Axes, label: str) -> None:
    """Add a colour bar for `log_image`, with a tick at each decade (or closer, for a short range).

    Does nothing when all cells are zero or non-finite.
    """
    if not (np.ma.compressed(drawn.get_array()) >= drawn.norm.vmin).any():
        return
    low, high = drawn.norm.vmin, drawn.norm.vmax
    exponents = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    ticks = [10.0**e for e in exponents]
    labels = [style.power(tick) for tick in ticks]
    if len(ticks) < 2:
        ticks = [float(tick) for tick in np.geomspace(low, high, 4)]
        labels = [f"{tick:.2g}" for tick in ticks]
    bar = figure.colorbar(drawn, ax=ax, pad=0.02)
    bar.set_ticks(ticks, labels=labels)
    bar.minorticks_off()
    bar.ax.tick_params(labelsize=style.TICK)
    bar.set_label(label, fontsize=style.LABEL)
