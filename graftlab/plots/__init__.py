"""Figures from a frame of rows or from a pair of tensors.

Every drawing function returns a matplotlib ``Figure`` and never touches pyplot, so it may be called from a widget
callback or any other thread; a notebook shows the figure without further calls. Pass ``ax`` to draw into your own axes:
legends are outside the axes, so give their figure ``layout="constrained"``. A figure without data contains a message;
a wrong argument (a missing column, tensors of different shapes) raises.

Names are imported on first use: a rank that only needs `max_downsample` does not import matplotlib and pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graftlab.diffs.maps import DifferenceMap, difference_map, max_downsample
    from graftlab.plots.pairs import draw_difference_map, heatmap, histogram, scatter
    from graftlab.plots.step_heatmap import over_steps
    from graftlab.plots.steps import history, ranks
    from graftlab.plots.style import to_png
    from graftlab.plots.taps import divergence
    from graftlab.verdict.order import first_divergent

__all__ = [
    "DifferenceMap",
    "difference_map",
    "divergence",
    "draw_difference_map",
    "first_divergent",
    "heatmap",
    "histogram",
    "history",
    "max_downsample",
    "over_steps",
    "ranks",
    "scatter",
    "to_png",
]

_HOMES = {
    "DifferenceMap": "graftlab.diffs.maps",
    "difference_map": "graftlab.diffs.maps",
    "divergence": "graftlab.plots.taps",
    "draw_difference_map": "graftlab.plots.pairs",
    "first_divergent": "graftlab.verdict.order",
    "heatmap": "graftlab.plots.pairs",
    "histogram": "graftlab.plots.pairs",
    "history": "graftlab.plots.steps",
    "max_downsample": "graftlab.diffs.maps",
    "over_steps": "graftlab.plots.step_heatmap",
    "ranks": "graftlab.plots.steps",
    "scatter": "graftlab.plots.pairs",
    "to_png": "graftlab.plots.style",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
