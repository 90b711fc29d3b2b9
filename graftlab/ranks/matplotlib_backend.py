"""pyplot's backend on a rank: ``plt.show()`` sends the open figures to the notebook, and closes them.

A separate module, because it imports matplotlib. Only a rank that uses pyplot loads it, through ``MPLBACKEND``, which
``matplotlib.use`` overrides.
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
    """Send every open figure, in the order of creation, and close them."""
    display = displays()
    for figure in map(pyplot.figure, pyplot.get_fignums()):
        if display is not None:
            display(figure)
        pyplot.close(figure)


def show_all_but(result: Any) -> None:
    """Show open figures at a cell's end, except ``result``, which is shown as the cell's value."""
    pyplot.close(result)
    show()
