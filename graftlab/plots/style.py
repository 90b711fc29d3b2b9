"""The style of all figures: palette, status marks, text and legends, and figures without pyplot."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import offset_copy

from graftlab.base import jupyter
from graftlab.plots import themes
from graftlab.plots.explorer import Canvas
from graftlab.rows.schema import DIFFERENCES, TENSOR_UNIT

Array = np.ndarray[Any, np.dtype[Any]]

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with all common kinds of colour vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#808080"
BASELINE, TARGET = BLUE, VERMILLION
LINES = ((BLUE, "-"), (BLACK, "--"), (SKY, "-."), (PURPLE, ":"), (GREEN, "-"), (ORANGE, "--"), (GREY, "-."))

LABEL, TICK, NOTE, TITLE = 10, 8.5, 9.5, 11
# For names side by side.
DENSE = 7.5
_LEGEND: dict[str, Any] = {"borderaxespad": 0.0, "frameon": False, "fontsize": TICK, "handletextpad": 0.6}

_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 6}

# Columns that are no differences.
_OTHERS = {"seconds": ("time spent in the tap", "s"), "numel": ("elements", "count")}


@dataclass(frozen=True)
class Mark:
    """How to draw a status. ``edge`` is the position of a row without a value."""

    color: str
    marker: str
    edge: str = "top"


MARKS = {
    "compared": Mark(BLUE, "o"),
    "grafted": Mark(GREEN, "D"),
    "failed": Mark(VERMILLION, "X"),
    "timeout": Mark(PURPLE, "s"),
    "missing": Mark(ORANGE, "v", "bottom"),
    "unmatched": Mark(YELLOW, "^", "bottom"),
    "recomputed": Mark(GREY, ".", "bottom"),
}
OTHER = Mark(GREY, "P", "bottom")

# Agg, the font cache and the layout engine are shared by all figures of a process.
_RENDERING = threading.Lock()


class NotebookFigure(Figure):
    """A figure that a notebook shows as a cell's value, whether or not pyplot was imported.

    With ``interactive``, a front end with widgets shows that canvas instead; the picture stays in the saved notebook.
    """

    interactive: Callable[[], Canvas] | None = None

    def _ipython_display_(self, **_: Any) -> None:
        if self.interactive is None or jupyter.show_canvas is None:
            raise NotImplementedError("the picture is shown")
        jupyter.show_canvas(self, self.interactive())

    def _repr_png_(self) -> bytes:
        return to_png(self)

    def _repr_html_(self) -> str:
        return themes.STYLE + to_html(self)


def to_png(figure: Figure, *, dpi: float = 110) -> bytes:
    """Render a figure to PNG bytes, one figure of the process at a time; safe to call from any thread.

    >>> gl.plots.to_png(gl.plots.divergence(run.frame))[:4]
    b'\\x89PNG'
    """
    out = io.BytesIO()
    with _RENDERING:
        themes.save(figure, out, dpi)
    return out.getvalue()


def to_html(figure: Figure, alt: str = "", dpi: float = 110) -> str:
    """Render a figure to HTML for pages with :data:`graftlab.plots.themes.STYLE`, one figure of the process at a time.

    ``alt`` describes it in words; the default is its titles and labels.
    """
    with _RENDERING:
        return themes.pictures(figure, alt, dpi)


def new_axes(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    """The given axes and their figure, or axes in a new figure of that size in inches."""
    if ax is not None:
        return whole_figure(ax), ax
    figure = NotebookFigure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def width_for(count: int) -> float:
    """The width in inches for ``count`` positions side by side. A page would shrink a wider figure with its text."""
    return float(np.clip(4.6 + 0.15 * count, 7.5, 10.5))


def whole_figure(ax: Axes) -> Figure:
    """The figure of axes, also of axes in a subfigure."""
    figure: Any = ax.figure
    while not isinstance(figure, Figure):
        figure = figure.figure
    return figure


def plain(text: object) -> str:
    """Escape text so that matplotlib draws it unchanged, without mathtext and control characters."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text)).replace("$", r"\$")


def plain_lines(text: str) -> str:
    """`plain` for text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def shorten(text: str, limit: int = 34) -> str:
    """Shorten a long name in its middle. In a module path, inner words are cut before numbers and the two ends.

    ``model.layers.12.self_attention.projection.out`` becomes ``model…12…projection.out``.
    """
    parts = text.split(".")
    droppable = [i for i in range(1, len(parts) - 1) if not parts[i].isdigit()]
    while len(text) > limit and droppable:
        parts[droppable.pop(0)] = ""
        text = re.sub(r"\.{2,}", "…", ".".join(parts))
    if len(text) <= limit:
        return text
    tail = (limit - 1) * 3 // 5  # names differ at the end more often than at the start
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def number(value: Any, digits: int = 3) -> str:
    """A number in few characters: ``3.2e-05``, ``1.25``, ``nan``; integers in full."""
    return str(value) if isinstance(value, (bool, int)) else f"{value:.{digits}g}"


def power(value: float) -> str:
    """A power of ten as an axis writes it. Not mathtext: its parser is shared by all threads."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def value_label(value: str, *, short: bool = False) -> str:
    """The axis label of a column, with its unit if it is a known statistic."""
    if (difference := DIFFERENCES.get(value)) is not None:
        text, unit = difference.label, difference.unit
        if value == "cosine":
            text = f"1 - {text}"
    elif value in _OTHERS:
        text, unit = _OTHERS[value]
    else:
        return (
            f"{plain(value)}  ({TENSOR_UNIT})"
            if re.fullmatch("(mean|std|min|max)_(baseline|target)", value)
            else plain(value)
        )
    return f"{value_name(value) if short else text}  ({unit})"


def value_name(value: str) -> str:
    """The name of a column in figures, which show a cosine by its distance from that of equal tensors."""
    return "1 - cosine" if value == "cosine" else value


def label_axes(ax: Axes, x: str, y: str) -> None:
    ax.set_xlabel(x, fontsize=LABEL)
    ax.set_ylabel(y, fontsize=LABEL)
    ax.tick_params(labelsize=TICK)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def head(ax: Axes, *lines: str, size: float = TITLE) -> None:
    """Set a left-aligned title of several lines; empty ones are left out."""
    ax.set_title("\n".join(plain(line) for line in lines if line), fontsize=size, loc="left")


def say(ax: Axes, message: str) -> None:
    """Show a message of one or more lines in place of data."""
    ax.set_xticks([])
    ax.set_yticks([])
    middle: dict[str, Any] = {"ha": "center", "va": "center", "transform": ax.transAxes}
    ax.text(0.5, 0.5, plain_lines(message), fontsize=LABEL, color=GREY, wrap=True, **middle)


def marks(
    ax: Axes,
    x: Array,
    y: Array,
    look: Mark,
    *,
    face: str,
    edge: str,
    size: float,
    above: float,
    gid: str,
    width: float | None = None,
) -> None:
    """Draw one collection of marks, if any; marks at the edge of the axes are not clipped."""
    if len(x):
        thickness = width if width is not None else 1.2 if face == "none" else 0.6
        points = ax.scatter(x, y, s=size, marker=look.marker, facecolors=face, edgecolors=edge, linewidths=thickness)
        points.set(zorder=above, clip_on=False, gid=gid)


def rings(ax: Axes, x: Array, y: Array, *, size: float, gid: str) -> None:
    """Draw rings around important points, with a halo so that they show on any colour."""
    for color, width, halo in (("white", 4.0, " halo"), (VERMILLION, 2.0, "")):
        look = Mark(color, "o")
        marks(ax, x, y, look, face="none", edge=color, size=size, width=width, above=8, gid=gid + halo)


def legend(ax: Axes, handles: Sequence[Any], columns: int = 1) -> None:
    """Add a legend to the right of the axes, where it covers no data."""
    if handles:
        ax.legend(handles=list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0), ncols=columns, **_LEGEND)


def legend_below(ax: Axes, handles: Sequence[Any], points: float = 40) -> None:
    """Add a one-line legend ``points`` below the axes, for images, which have a colour bar on their right."""
    if handles:
        under = offset_copy(ax.transAxes, whole_figure(ax), y=-points, units="points")
        place: dict[str, Any] = {"bbox_to_anchor": (0.5, 0.0), "bbox_transform": under}
        ax.legend(handles=list(handles), loc="upper center", ncols=4, **place, **_LEGEND)


def point_out(
    ax: Axes, text: str, xy: tuple[float, float], *, share: float, level: int = 0, color: str | None = None
) -> Annotation:
    """Add text above the axes, where it covers no data, with an arrow straight down to the point.

    ``share`` is the point's distance from the left, as a share of the width; ``level`` is the line of text, counted
    from the axes.
    """
    side, anchor = ("left", 0.0) if share < 0.35 else ("right", 1.0) if share > 0.65 else ("center", 0.5)
    note = ax.annotate(
        plain(text),
        xy=xy,
        xytext=(xy[0], 1.0),
        textcoords=offset_copy(ax.get_xaxis_transform(), whole_figure(ax), y=7 + 15 * level, units="points"),
        arrowprops={**_ARROW, "relpos": (anchor, 0.0)},
        annotation_clip=False,
    )
    # Above the arrows from higher lines of text.
    note.set(ha=side, va="bottom", fontsize=NOTE, fontweight="bold", zorder=20 - level)
    note.set_bbox({"facecolor": whole_figure(ax).get_facecolor(), "edgecolor": "none", "pad": 1.0})
    note.set_color(ink() if color is None else color)
    return note


def key(
    label: str, color: str, marker: str = "", line: Any = "none", *, hollow: bool = False, size: float = 7
) -> Line2D:
    """A legend entry for a mark, a line, or both."""
    text = plain(label)
    text = f" {text}" if text.startswith("_") else text  # matplotlib hides labels that begin with an underscore
    entry = Line2D([], [], color=color, marker=marker, linestyle=line, markersize=size, label=text)
    entry.set_markerfacecolor("none" if hollow else color)
    entry.set_markeredgecolor(color if hollow or marker == "x" else ink())
    entry.set_markeredgewidth(1.2 if hollow or marker == "x" else 0.4)
    return entry


def ring_key() -> Line2D:
    return key("non-finite differs", VERMILLION, "o", hollow=True, size=11)


def status_key(status: str) -> Line2D:
    return key(status, look(status).color, look(status).marker)


def look(status: str) -> Mark:
    return MARKS.get(status, OTHER)


def ink() -> str:
    """The current text colour, so that marks stay visible in a dark style."""
    return str(rcParams["text.color"])
