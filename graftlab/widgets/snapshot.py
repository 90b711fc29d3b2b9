"""What stays of a widget in a saved notebook: markup that is shown where the widget itself cannot be.

A notebook that is opened without its kernel knows nothing of widgets. JupyterLab says "model not found" then, other
viewers show a name. So each panel is followed by an output of plain markup. Beside a live panel it is hidden; without
one it is shown, and what JupyterLab says in the panel's place is hidden.
"""

from __future__ import annotations

import uuid
from typing import Any

from IPython.display import publish_display_data

# :has is in all browsers since 2023. Viewers that drop styles show the markup, as they show no widget.
_STYLE = """<style>
.jp-OutputArea:has(.graftlab-panel) > .jp-OutputArea-child:has(.graftlab-static) { display: none }
.jp-OutputArea:has(.graftlab-static) > .jp-OutputArea-child:has(> .jupyter-widgets:not(:has(*))) { display: none }
.graftlab-static table { border-collapse: collapse; font-size: 12px }
.graftlab-static td, .graftlab-static th { padding: 2px 8px; text-align: left }
.graftlab-static img { max-width: 100% }
</style>"""


class Snapshot:
    """The output that follows a widget's own. Any thread may update it."""

    def __init__(self) -> None:
        self._id = f"graftlab-{uuid.uuid4().hex}"
        self.is_shown = False
        self._shown = ""

    def display(self, widget: dict[str, Any] | None) -> None:
        """Show the widget, by its MIME bundle, and an output below it for :meth:`update`."""
        data = dict(widget or {})
        if not data:
            return
        # What viewers without widgets would show beside the markup: a repr of the widget's parts.
        data["text/plain"] = ""
        publish_display_data(data)  # type: ignore[no-untyped-call]
        self._publish("", update=False)
        self.is_shown = True

    def update(self, markup: str) -> None:
        """Bring what is saved with the notebook up to date."""
        if markup != self._shown:
            self._shown = markup
            self._publish(markup, update=True)

    def _publish(self, markup: str, update: bool) -> None:
        data = {"text/html": f'{_STYLE}<div class="graftlab-static">{markup}</div>', "text/plain": ""}
        publish_display_data(data, transient={"display_id": self._id}, update=update)  # type: ignore[no-untyped-call]
