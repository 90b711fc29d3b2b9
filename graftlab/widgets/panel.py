"""The base of every widget that shows a session: what each would otherwise solve by itself."""

from __future__ import annotations

import functools
import html
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anywidget
import ipywidgets as widgets
import traitlets
from IPython.display import publish_display_data

from graftlab.control.core import SessionCore
from graftlab.errors import GraftError
from graftlab.widgets.inputs import Inputs, PanelInput
from graftlab.widgets.refresher import explain, refresher_of
from graftlab.widgets.style import PANEL_STYLE

logger = logging.getLogger(__name__)

# What stays in the notebook is made anew this often at the most, in seconds, and takes this part of one core.
_SNAPSHOT_INTERVAL = 2.0
_SNAPSHOT_SHARE = 0.1

STATUSES = ("quiet", "good", "bad", "overtaken")


class Panel(widgets.VBox):  # type: ignore[misc]
    """Shows a session, is kept up to date by its refresher, and acts on it.

    - What fails in a callback, in the background or in a refresh is shown in the panel's message.
    - :meth:`submit` acts on what is on the screen at the click, however busy the kernel is, and then raises
      ``acknowledged``.
    - When nobody looks any more, because the output was cleared, the panel is left alone until somebody does.
    - :meth:`close`, or the end of the session, ends its work.

    A panel with a ``parent`` is a part of it: it shares the parent's lock and thread, and shows its messages there.
    Methods may be called from any thread.

    A subclass makes its widgets and calls :meth:`_open`. :meth:`_follow` takes in what is new in the session,
    :meth:`_show` shows the state, and :meth:`_act` does what was submitted; the first two with the lock held.
    """

    message = traitlets.Unicode(read_only=True, help="What is said at this moment; empty for nothing.")
    status = traitlets.Enum(STATUSES, "quiet", read_only=True, help="How the message is meant.")
    acknowledged = traitlets.Int(0, read_only=True, help="How many submits were acted on.")
    busy = traitlets.Bool(False, read_only=True, help="Whether something goes on in the background.")

    style_sheet = ""
    """What the subclass looks like, beside :data:`PANEL_STYLE`."""

    closed_message = ""
    """What is said instead of anything else once the session is closed."""

    def __init__(self, session: SessionCore, *, parent: Panel | None = None) -> None:
        self.session = session
        self._parent = parent
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        # Starts its thread when there is something to do.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"graftlab-{type(self).__name__}")
        self._in_progress = 0
        self._said = ("", "quiet")
        self._trouble = ""
        self._closed = False
        self._inputs: Inputs | None = None
        self._snapshot = Snapshot()
        self._snapshot_state: object = None
        self._next_snapshot = 0.0
        self._message_line: widgets.HTML = widgets.HTML() if parent is None else parent._message_line
        self._message_line.add_class("graftlab-message")
        super().__init__()

    def _open(self, children: Sequence[widgets.Widget], inputs: Mapping[str, PanelInput] | None = None) -> None:
        """Show these widgets, and keep them up to date from now on."""
        if inputs is not None:
            self._inputs = Inputs(inputs, self.guarded(self._on_read))
        self.add_class("graftlab-panel" if self._parent is None else "graftlab-part")
        if self._parent is None:
            sheet = widgets.HTML(f"<style>{PANEL_STYLE}{self.style_sheet}</style>", layout={"display": "none"})
            children = [sheet, *children, *_watch(children)]
        self.children = tuple(children)
        self.refresh()
        if self._parent is None:
            # Front ends that count views say when the last one is gone.
            self._view_count = 0
            self.observe(self.guarded(self._on_view_count), "_view_count")
            refresher_of(self.session).add(self)

    # ---- for the caller -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show what is new in the session; called by its refresher, and cheap where nothing is."""
        with self._lock:
            if not self._closed:
                # Before it is shown: what ends meanwhile, with its last rows, is not what this shows.
                stage = self._stage()
                self._follow()
                self._show()
                if stage is not None:
                    self._renew_snapshot(stage, stage[0])

    def _stage(self) -> tuple[bool, int, bool, int] | None:
        """Whether the session is closed, and how far it has come; None where nothing stays in the notebook."""
        if self._parent is not None or not self._snapshot.is_shown:
            return None
        session, runs = self.session, self.session.runs
        return session.closed, len(runs), bool(runs) and runs[-1].done, session.plan.version

    def _renew_snapshot(self, state: object, closed: bool) -> None:
        """Bring what stays in the notebook up to date when a run or the session has ended, or the plan changed."""
        if state == self._snapshot_state:
            return
        if closed:
            self._snapshot_state = state
            self._snapshot.update(self.static_html(with_figures=True))
        elif time.monotonic() >= self._next_snapshot:
            self._snapshot_state = state
            # Not again before this one is done.
            self._next_snapshot = math.inf
            self.in_background(self._take_snapshot)

    def _take_snapshot(self) -> None:
        began = time.monotonic()
        try:
            self._snapshot.update(self.static_html(with_figures=True))
        finally:
            self._next_snapshot = began + max(_SNAPSHOT_INTERVAL, (time.monotonic() - began) / _SNAPSHOT_SHARE)

    def show_error(self, text: str) -> None:
        """Show why a refresh failed; the empty text says that it works again."""
        with self._lock:
            self._trouble = text
            self._show_message()

    def say(self, text: str, status: str = "quiet") -> None:
        """Show a message in the place of the one before; ``status`` is one of :data:`STATUSES`."""
        if self._parent is not None:
            self._parent.say(text, status)
            return
        with self._lock:
            self._said = text, status
            if not self._closed:
                self._show()

    def submit(self, action: str, **known: Any) -> None:
        """Do ``action`` with what is on the screen; without a browser that shows the panel nothing happens.

        ``known`` are inputs whose value came along with a key.
        """
        if self._parent is not None:
            self._parent.submit(action, **known)
        elif self._inputs is not None:
            self._inputs.read(action, **known)

    def static_html(self, with_figures: bool = False) -> str:
        """The state as markup alone, for where no kernel and no widget is: a saved notebook, a page made of one.

        ``with_figures`` are drawn too, which may take a second.
        """
        return f"<p>{html.escape(self.message)}</p>"

    def _ipython_display_(self, **_: Any) -> None:
        self._snapshot.display(super()._repr_mimebundle_())
        with self._lock:
            self._snapshot_state = None
        self.refresh()

    def close(self) -> None:
        """Take the panel out of the browser and leave the session alone; what waits to be done is forgotten."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._parent is None:
            refresher_of(self.session).remove(self)
        self._worker.shutdown(wait=False, cancel_futures=True)
        for child in self.children:
            close_all(child)
        super().close()

    # ---- for the subclass ---------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Take in what is new in the session."""

    def _show(self) -> None:
        """Show the state; the browser is only to be sent what has changed."""
        self._show_message()

    def _act(self, action: str, values: dict[str, Any]) -> None:
        """Do what was submitted, with the values of all inputs."""
        raise NotImplementedError

    def guarded(self, callback: Callable[..., object]) -> Callable[..., None]:
        """The callback, with its exceptions shown: nobody else would show them."""

        @functools.wraps(callback)
        def call(*arguments: Any) -> None:
            try:
                callback(*arguments)
            except Exception as error:
                if not isinstance(error, GraftError):
                    logger.exception("a callback of the %s failed", type(self).__name__)
                # Not by say, which shows everything: what fails may be just that.
                panel = self if self._parent is None else self._parent
                with panel._lock:
                    panel._said = explain(error), "bad"
                    panel._show_message()

        return call

    def in_background(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call it on the panel's one thread, after what has been given there before."""
        if self._parent is not None:
            self._parent.in_background(callback, *arguments)
            return
        with self._lock:
            if self._closed:
                return
            self._in_progress += 1
            self.set_trait("busy", True)
            self._worker.submit(self._do_task, self.guarded(callback), *arguments)

    def button(self, label: str, name: str, tooltip: str, press: Callable[[], object]) -> widgets.Button:
        """A button with the class ``graftlab-NAME``."""
        made = widgets.Button(description=label, tooltip=tooltip, layout={"width": "auto"})
        made.on_click(self.guarded(lambda _: press()))
        return made.add_class(f"graftlab-{name}")

    # ---- inner --------------------------------------------------------------------------------------------------

    def _on_read(self, action: str, values: dict[str, Any]) -> None:
        try:
            self._act(action, values)
        finally:
            with self._lock:
                self.set_trait("acknowledged", self.acknowledged + 1)

    def _do_task(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            callback(*arguments)
        finally:
            with self._lock:
                self._in_progress -= 1
                self.set_trait("busy", self._in_progress > 0)

    def _on_view_count(self, change: Any) -> None:
        if change["new"] == 0 and change["old"]:
            refresher_of(self.session).remove(self)
        elif change["new"] and not change["old"] and not self._closed:
            refresher_of(self.session).add(self)
            self.refresh()

    def _show_message(self) -> None:
        if self._closed:
            return
        text, status = (self._trouble, "bad") if self._trouble else self._said
        if self.closed_message and self.session.closed:
            text, status = self.closed_message, "quiet"
        self.set_trait("message", text)
        self.set_trait("status", status)
        role = "alert" if status == "bad" else "status"
        # Several lines are code with a mark below it, which only a font of one width keeps in its place.
        kind = f"{status} lines" if "\n" in text else status
        shown = f'<div class="{kind}" role="{role}">{html.escape(text)}</div>' if text else ""
        update(self._message_line, value=shown)


class FoldableBox(widgets.VBox):  # type: ignore[misc]
    """What is only of interest now and then: a button that shows and hides it. ipywidgets' own has no keys."""

    def __init__(self, content: widgets.Widget) -> None:
        self._content = content
        self._button = widgets.Button(layout={"width": "auto"}).add_class("graftlab-fold-button")
        self._button.on_click(lambda _: self.unfold(not self.is_open))
        super().__init__([self._button, content])
        self.add_class("graftlab-fold")
        self.unfold(False)

    @property
    def is_open(self) -> bool:
        """Whether the content is shown."""
        return bool(self._content.layout.display != "none")

    def unfold(self, shown: bool = True) -> None:
        """Show the content, or hide it."""
        self._content.layout.display = None if shown else "none"
        update(self._button, icon="caret-down" if shown else "caret-right", tooltip="Hide" if shown else "Show")

    @property
    def title(self) -> str:
        """What is written on the button."""
        title: str = self._button.description
        return title

    @title.setter
    def title(self, title: str) -> None:
        self._button.description = title


def update(widget: Any, **values: Any) -> None:
    """Set several traits. The browser is sent those that have another value now than before."""
    for trait, value in values.items():
        setattr(widget, trait, value)


def close_all(widget: widgets.Widget) -> None:
    """Close a widget with what is in it, which ipywidgets leaves open."""
    if not isinstance(widget, Panel):
        for child in getattr(widget, "children", ()):
            close_all(child)
    widget.close()


def _watch(shown: Sequence[widgets.Widget]) -> list[widgets.Widget]:
    """What tells the page that the kernel has ended, beside widgets that take anywidget too: a page may have none."""
    if not any(_takes_anywidget(each) for each in shown):
        return []
    return [KernelWatch()]


def _takes_anywidget(widget: widgets.Widget) -> bool:
    return widget.has_trait("_esm") or any(_takes_anywidget(each) for each in getattr(widget, "children", ()))


def row(*children: widgets.Widget) -> widgets.HBox:
    """Widgets next to each other, or below where there is no room."""
    return widgets.HBox(children, layout=widgets.Layout(flex_flow="row wrap", align_items="center"))


# The mark is the one that JupyterLab sets at a restart. Front ends whose widgets do not know their kernel have no mark.
_WATCH_SCRIPT = """
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

    _esm = _WATCH_SCRIPT

    def __init__(self) -> None:
        super().__init__(layout=widgets.Layout(display="none"))


# :has is in all browsers since 2023. Viewers that drop styles show the markup, as they show no widget.
_SNAPSHOT_STYLE = """<style>
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
        data = {"text/html": f'{_SNAPSHOT_STYLE}<div class="graftlab-static">{markup}</div>', "text/plain": ""}
        publish_display_data(data, transient={"display_id": self._id}, update=update)  # type: ignore[no-untyped-call]
