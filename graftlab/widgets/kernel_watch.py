"""Tells a page when the kernel of its panels has ended. JupyterLab tells widgets of a restart, and not of an end."""

from __future__ import annotations

import anywidget
import ipywidgets as widgets

# The mark is the one that JupyterLab sets at a restart. Front ends whose widgets do not know their kernel have no mark.
_SCRIPT = """
export default {
  render({ model, el }) {
    const ended = model.widget_manager?.kernel?.disposed;
    if (typeof ended?.connect !== "function") return;
    const mark = () => el.closest(".graftlab-panel")?.classList.add("jupyter-widgets-disconnected");
    ended.connect(mark);
    return () => ended.disconnect(mark);
  },
};
"""


class KernelWatch(anywidget.AnyWidget):
    """Shows nothing; marks the panel that it is in as not live when the kernel is shut down."""

    _esm = _SCRIPT

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))
