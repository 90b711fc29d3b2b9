"""A figure of taps in a notebook: the interactive canvas, and the picture where there are no widgets."""

from __future__ import annotations

import html
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ipywidgets as widgets
from IPython.core.getipython import get_ipython

from graftlab.errors import GraftError
from graftlab.plots.explorer import Canvas
from graftlab.plots.style import NotebookFigure
from graftlab.plots.themes import STYLE, with_fewer_colours
from graftlab.widgets.panel import update
from graftlab.widgets.refresher import explain
from graftlab.widgets.snapshot import KernelWatch, Snapshot
from graftlab.widgets.tap_explorer import TapView, as_floor, drawn

logger = logging.getLogger(__name__)

# Without its kernel the canvas still shows its taps.
_SHEET = """<style>
.graftlab-canvas { max-width: 1100px; overflow: visible }
.graftlab-canvas.jupyter-widgets-disconnected::before { content: none; padding: 0 }
.graftlab-canvas .jupyter-widgets-disconnected::before { content: none; padding: 0 }
.graftlab-canvas .graftlab-pair img { max-width: 100% }
</style>"""


class FigureView(widgets.VBox):  # type: ignore[misc]
    """The canvas. A click on a tap opens its pair below it."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas = canvas
        self.view = TapView(figures=canvas.state, actions=["open"], foldable=True)
        self.view.on_msg(self._on_message)
        self._pair = widgets.HTML().add_class("graftlab-pair")
        # Starts its thread with the first pair.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-pair")
        sheet = widgets.HTML(_SHEET, layout={"display": "none"})
        self.snapshot = Snapshot()
        super().__init__([sheet, self.view, self._pair, KernelWatch(self.snapshot.id)])
        self.add_class("graftlab-canvas")

    def _on_message(self, _view: Any, content: Any, _buffers: Any) -> None:
        what, label = content["what"], content["value"]
        labels = self._canvas.state["label"]
        if what == "chosen":
            update(self._pair, value="")
        elif what == "floor" and self._canvas.with_floor is not None:
            self.view.figures = dict(self._canvas.with_floor(as_floor(label)))
        elif what == "open" and label in labels:
            self._worker.submit(self._open, str(label), labels.index(label))

    def _open(self, label: str, tap: int) -> None:
        try:
            shown = STYLE + drawn(label, self._canvas.open(tap))
        except Exception as error:
            # No caller would see an exception of this thread.
            if not isinstance(error, GraftError):
                logger.exception("the pair of %s cannot be shown", label)
            shown = f'<div role="alert">{html.escape(explain(error))}</div>'
        update(self._pair, value=shown)
        self.view.send({"what": "opened"})


def show_canvas(figure: NotebookFigure, canvas: Canvas) -> None:
    """Display the canvas, followed by the figure for places without widgets.

    Raises NotImplementedError where no notebook could show a widget.
    """
    if getattr(get_ipython(), "kernel", None) is None:
        raise NotImplementedError("the picture is shown")
    view = FigureView(canvas)
    view.snapshot.display(
        view._repr_mimebundle_(),
        figure._repr_html_(),
        {"image/png": with_fewer_colours(figure._repr_png_())},
    )
