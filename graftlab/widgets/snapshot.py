"""What a notebook shows in place of a widget without its kernel, and the mark of a widget whose kernel has ended."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets
from IPython.display import publish_display_data

# Sets the class that JupyterLab sets at a restart. Other front ends may not give widgets access to their kernel.
# Where outputs are not marked up as in JupyterLab, its style sheet cannot hide the snapshot, which may come later.
_WATCH_SCRIPT = """
export default {
  render({ model, el }) {
    requestAnimationFrame(() => {
      // A picture that unfolds is to be in view; the event does not bubble.
      const show = ({ target }) => { if (target.open) target.scrollIntoView({ block: "nearest" }); };
      el.closest(".graftlab-panel")?.addEventListener("toggle", show, true);
    });
    const hide = () => {
      // JupyterLab has a style for it. A widget that has left the page hides nothing.
      if (!el.isConnected || el.closest(".jp-OutputArea")) return;
      document.getElementById(model.get("snapshot"))?.setAttribute("hidden", "");
    };
    const observer = new MutationObserver(hide);
    observer.observe(document.body, { childList: true, subtree: true });
    hide();
    const ended = model.widget_manager?.kernel?.disposed;
    const mark = () => el.closest(".graftlab-panel, .graftlab-canvas")?.classList.add("jupyter-widgets-disconnected");
    const watched = typeof ended?.connect === "function";
    if (watched) ended.connect(mark);
    return () => {
      observer.disconnect();
      if (watched) ended.disconnect(mark);
    };
  },
};
"""


class KernelWatch(anywidget.AnyWidget):
    """Invisible; marks its panel as not live when the kernel shuts down, and hides its snapshot beside it.

    JupyterLab only marks it at a restart.
    """

    _esm = _WATCH_SCRIPT
    snapshot = traitlets.Unicode().tag(sync=True)

    def __init__(self, snapshot: str) -> None:
        super().__init__(snapshot=snapshot, layout=widgets.Layout(display="none"))


# All browsers support :has since 2023. Viewers that drop styles show the HTML, since they show no widget.
_SNAPSHOT_STYLE = """<style>
.jp-OutputArea:has(.graftlab-panel, .graftlab-canvas) > .jp-OutputArea-child:has(.graftlab-static) { display: none }
.jp-OutputArea:has(.graftlab-static) > .jp-OutputArea-child:has(> .jupyter-widgets:not(:has(*))) { display: none }
.graftlab-static table { border-collapse: collapse; font-size: 12px }
.graftlab-static td, .graftlab-static th { padding: 2px 8px; text-align: left }
.graftlab-static img { max-width: 100% }
</style>"""


class Snapshot:
    """The plain HTML that stays in a saved notebook in place of a widget.

    Without its kernel a notebook cannot show widgets: JupyterLab shows "model not found", other viewers a name. So each
    panel is followed by an output of plain HTML, which is hidden beside a live panel and shown without one. Any thread
    may update it.
    """

    def __init__(self) -> None:
        self.id = f"graftlab-{uuid.uuid4().hex}"
        self.is_shown = False
        self._shown = ""

    def display(
        self, widget: dict[str, Any] | None, markup: str, instead: Mapping[str, str | bytes] | None = None
    ) -> None:
        """Display the widget's MIME bundle, and below it this HTML as an output for :meth:`update`.

        ``instead`` is for viewers without HTML, by MIME type.
        """
        data = dict(widget or {})
        if not data:
            return
        # Otherwise viewers without widgets would show a repr beside the HTML.
        data["text/plain"] = ""
        publish_display_data(data)  # type: ignore[no-untyped-call]
        self._shown = markup
        self._publish(markup, update=False, instead=instead)
        self.is_shown = True

    def update(self, markup: str) -> None:
        """Replace the HTML that is saved with the notebook."""
        if markup != self._shown:
            self._shown = markup
            self._publish(markup, update=True)

    def _publish(self, markup: str, update: bool, instead: Mapping[str, str | bytes] | None = None) -> None:
        shown = f'{_SNAPSHOT_STYLE}<div id="{self.id}" class="graftlab-static">{markup}</div>'
        data = {"text/plain": "", **(instead or {}), "text/html": shown}
        publish_display_data(data, transient={"display_id": self.id}, update=update)  # type: ignore[no-untyped-call]
