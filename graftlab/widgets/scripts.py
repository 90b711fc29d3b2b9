"""Scripts that the widgets of a page share: a page, and a notebook with saved widgets, has each script once."""

from __future__ import annotations

import threading
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets

# Imports the script of another widget. Its default export is what anywidget takes: an object, or a function of none.
_LOADER = """
const imported = (globalThis.graftlabScripts ??= new Map());
function load(source) {
  if (!imported.has(source)) {
    imported.set(source, import(URL.createObjectURL(new Blob([source], { type: "text/javascript" }))));
  }
  return imported.get(source);
}
export default async () => {
  let made;
  return {
    async initialize({ model }) {
      const script = await model.widget_manager.get_model(model.get("script").replace("IPY_MODEL_", ""));
      made = (await load(script.get("source"))).default;
      if (typeof made === "function") made = await made();
      return made.initialize?.({ model });
    },
    render: (view) => made.render(view),
  };
};
"""


class Script(widgets.Widget):  # type: ignore[misc]
    """The text of a script. Use :func:`shared`."""

    source = traitlets.Unicode().tag(sync=True)


class ScriptedWidget(anywidget.AnyWidget):
    """A widget with a :class:`Script`, which it may share with others."""

    _esm = _LOADER
    script: traitlets.Instance[Any] = traitlets.Instance(Script).tag(sync=True, **widgets.widget_serialization)


_scripts: dict[str, Script] = {}
_lock = threading.Lock()


def shared(source: str) -> Script:
    """Return the script with this text that the kernel has sent to the page, or send it."""
    with _lock:
        found = _scripts.get(source)
        # It is closed by Widget.close_all.
        if found is None or found.comm is None:
            found = _scripts[source] = Script(source=source)
        return found
