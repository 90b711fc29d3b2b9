"""pyplot's backend on a rank: ``plt.show()`` sends the open figures to the notebook, and closes them.

Chosen by ``MPLBACKEND`` where the notebook's own backend would be; ``matplotlib.use`` takes another one.
"""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from graftlab.ranks.displays import displays

FigureCanvas = FigureCanvasAgg
FigureManager = FigureManagerBase


def show(*_: Any, **__: Any) -> None:
    """Send every open figure, in the order in which they were made, and close them."""
    to = displays()
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if to is not None:
            to(figure)
        pyplot.close(figure)


def show_all_but(result: Any) -> None:
    """The same at a cell's end, where a notebook shows what is open; ``result`` is shown as the cell's value."""
    pyplot.close(result)
    show()
