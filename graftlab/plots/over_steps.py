"""All taps through time: a heat map of taps over steps, with the step at which each first diverged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graftlab.plots import style
from graftlab.plots.cells import Cells, draw_cells, tap_label
from graftlab.verdict.order import group
from graftlab.verdict.summary import floor_of


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
    # In the order in which taps first ran, whichever step that was in.
    places: dict[Any, int] = {}
    for key in taps.keys:
        places.setdefault((key[0], *key[2:]), len(places))
    cells = Cells(
        names=[tap_label(tap, taps.tag_columns) for tap in places],
        steps=taps.steps,
        y=np.array([places[(key[0], *key[2:])] for key in taps.keys]),
        x=np.array([int(str(key[1])) for key in taps.keys]),
        value=np.abs(taps.value),
        apart=np.abs(taps.apart),
        measured=taps.measured,
        grafted=taps.statuses.get("grafted", np.zeros(len(taps.keys), dtype=bool)),
        differs=taps.nonfinite > 0,
    )
    return draw_cells(figure, ax, cells, value, *floor_of(frame, noise_floor))
