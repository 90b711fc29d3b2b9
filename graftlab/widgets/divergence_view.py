"""The part of the dashboard that shows the divergence figure, drawn less often the longer that takes."""

from __future__ import annotations

import base64
import html
import time
from collections.abc import Sequence

import ipywidgets as widgets

from graftlab import plots
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.widgets.panel import Panel, update

# The figure takes this part of one core at the most.
_SHARE = 0.2
_INTERVAL = 1.0


class DivergenceView(widgets.HTML):  # type: ignore[misc]
    """The figure of the newest rows. ``panel`` draws it in the background, and says what goes wrong."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._drawn_count = -1
        self._is_drawing = False
        self._next_drawing = 0.0
        super().__init__()
        self.add_class("graftlab-figure")

    def show(self, rows: Sequence[Row], row_count: int, is_running: bool) -> None:
        """Draw these rows if there are new ones among ``row_count``; while a run goes on, not too often."""
        if row_count == self._drawn_count or self._is_drawing:
            return
        if is_running and time.monotonic() < self._next_drawing:
            return
        self._drawn_count = row_count
        self._is_drawing = True
        self._panel.in_background(self._draw, list(rows))

    def _draw(self, rows: list[Row]) -> None:
        began = time.monotonic()
        try:
            # In the order in which they stand, as if all were of one step.
            frame = to_frame([row._replace(step=0, order=place) for place, row in enumerate(rows)])
            picture = base64.b64encode(plots.to_png(plots.divergence(frame))).decode("ascii")
            alt = html.escape(
                f"rel_l2 of each tap in execution order, {len(rows)} rows; the taps' table has the figures"
            )
            update(self, value=f'<img alt="{alt}" src="data:image/png;base64,{picture}">')
        finally:
            self._is_drawing = False
            self._next_drawing = began + max(_INTERVAL, (time.monotonic() - began) / _SHARE)
