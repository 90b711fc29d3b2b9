"""The base of every widget that shows a session."""

from __future__ import annotations

import functools
import html
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ipywidgets as widgets
import traitlets

from graftlab.control.core import SessionCore
from graftlab.errors import GraftError
from graftlab.plan.plan import GraftPlan
from graftlab.rows.schema import Row
from graftlab.widgets.inputs import Inputs, PanelInput
from graftlab.widgets.refresher import explain, refresher_of
from graftlab.widgets.snapshot import KernelWatch, Snapshot

logger = logging.getLogger(__name__)

# The snapshot is renewed at most this often, in seconds, and takes at most this share of one core.
_SNAPSHOT_INTERVAL = 2.0
_SNAPSHOT_SHARE = 0.1

STATUSES = ("quiet", "good", "bad", "overtaken")


class Panel(widgets.VBox):  # type: ignore[misc]
    """Shows a session and acts on it; the session's refresher keeps it up to date.

    - An exception in a callback, in the background or in a refresh is shown in the panel's message.
    - :meth:`submit` acts on the inputs as they were on the screen at the click, however busy the kernel is, and then
      raises ``acknowledged``.
    - While no page shows the panel, because its output was cleared, it is not refreshed.
    - :meth:`close`, or the end of the session, ends its work.

    A panel with a ``parent`` is a part of it: it shares the parent's lock and thread, and shows its messages there.
    Methods may be called from any thread.

    A subclass makes its widgets and calls :meth:`_open`. :meth:`_follow` reads the changes of the session,
    :meth:`_show` shows the state, and :meth:`_act` performs a submitted action; the first two with the lock held.
    """

    message = traitlets.Unicode(read_only=True, help="The current message; empty for none.")
    status = traitlets.Enum(STATUSES, "quiet", read_only=True, help="The kind of message.")
    acknowledged = traitlets.Int(0, read_only=True, help="The number of processed submits.")
    busy = traitlets.Bool(False, read_only=True, help="Whether work runs in the background.")

    style_sheet = ""
    """The subclass's CSS, in addition to :data:`PANEL_STYLE`."""

    closed_message = ""
    """The only message once the session is closed."""

    def __init__(self, session: SessionCore, *, parent: Panel | None = None) -> None:
        self.session = session
        self._parent = parent
        self._lock: threading.RLock = threading.RLock() if parent is None else parent._lock
        # Starts its thread with the first task.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"graftlab-{type(self).__name__}")
        self._in_progress = 0
        self._current_message = ("", "quiet")
        self._message_later: Callable[[], str] | None = None
        self._refresh_error = ""
        self._closed = False
        self._inputs: Inputs | None = None
        self._snapshot = Snapshot()
        self._snapshot_state: object = None
        self._next_snapshot = 0.0
        self._message_line: widgets.HTML = widgets.HTML() if parent is None else parent._message_line
        self._message_line.add_class("graftlab-message")
        super().__init__()

    def _open(self, children: Sequence[widgets.Widget], inputs: Mapping[str, PanelInput] | None = None) -> None:
        """Show these widgets and keep them up to date."""
        if inputs is not None:
            self._inputs = Inputs(inputs, self.guarded(self._on_read))
        self.add_class("graftlab-panel" if self._parent is None else "graftlab-part")
        if self._parent is None:
            sheet = widgets.HTML(f"<style>{PANEL_STYLE}{self.style_sheet}</style>", layout={"display": "none"})
            children = [sheet, *children, *_watch(children, self._snapshot.id)]
        self.children = tuple(children)
        self.refresh()
        if self._parent is None:
            # Front ends that count views report when the last one closes.
            self._view_count = 0
            self.observe(self.guarded(self._on_view_count), "_view_count")
            refresher_of(self.session).add(self)

    # ---- for the caller -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show the changes of the session. Called by its refresher; cheap without changes."""
        with self._lock:
            if not self._closed:
                # Before the display: a run that ends meanwhile, with its last rows, is not shown yet.
                stage = self._session_state()
                self._follow()
                if self._message_later is not None and (text := self._message_later()):
                    self._current_message, self._message_later = (text, self._current_message[1]), None
                self._show()
                if stage is not None:
                    self._renew_snapshot(stage, stage[0])

    def _session_state(self) -> tuple[bool, int, bool, int] | None:
        """Whether the session is closed, and its progress; None for a panel without a snapshot."""
        if self._parent is not None or not self._snapshot.is_shown:
            return None
        session, runs = self.session, self.session.runs
        return session.closed, len(runs), bool(runs) and runs[-1].done, session.plan.version

    def _renew_snapshot(self, state: object, closed: bool) -> None:
        """Renew the snapshot when a run or the session has ended, or the plan has changed."""
        if state == self._snapshot_state:
            return
        if closed:
            self._snapshot_state = state
            self._snapshot.update(self.static_html(with_figures=True))
        elif time.monotonic() >= self._next_snapshot:
            self._snapshot_state = state
            # Not again before this one is finished.
            self._next_snapshot = math.inf
            self.in_background(self._take_snapshot)

    def _take_snapshot(self) -> None:
        began = time.monotonic()
        try:
            self._snapshot.update(self.static_html(with_figures=True))
        finally:
            self._next_snapshot = began + max(_SNAPSHOT_INTERVAL, (time.monotonic() - began) / _SNAPSHOT_SHARE)

    def show_error(self, text: str) -> None:
        """Show why a refresh failed; an empty text means that it works again."""
        with self._lock:
            self._refresh_error = text
            self._show_message()

    def say(self, text: str, status: str = "quiet", later: Callable[[], str] | None = None) -> None:
        """Replace the message; ``status`` is one of :data:`STATUSES`.

        ``later`` returns the text to show instead once this one is outdated, and an empty one until then.
        """
        if self._parent is not None:
            self._parent.say(text, status, later)
            return
        with self._lock:
            self._current_message, self._message_later = (text, status), later
            if not self._closed:
                self._show()

    def say_kept(self, what: str, plan: GraftPlan, rows: Callable[[], Iterable[Row]]) -> None:
        """Say that this plan keeps ``what``: from the next step on or, if ``rows`` are of it, since which step."""

        def since() -> str:
            if not any(row.plan_version >= plan.version for row in rows()):
                return ""
            return f"Plan {plan.version} keeps {what} since step {min(self.session.adopted(plan.version).values())}."

        if text := since():
            self.say(text, "good")
        else:
            self.say(f"Plan {plan.version} keeps {what}; tensors arrive with the next step.", "good", since)

    def submit(self, action: str, **known: Any) -> None:
        """Perform ``action`` with the inputs on the screen. Without a page that shows the panel nothing happens.

        ``known`` are inputs whose value arrived with a key press.
        """
        if self._parent is not None:
            self._parent.submit(action, **known)
        elif self._inputs is not None:
            self._inputs.read(action, **known)

    def static_html(self, with_figures: bool = False) -> str:
        """The state as plain HTML, for places without a kernel or widgets, such as a saved notebook.

        ``with_figures`` adds figures, which may take a second.
        """
        return f"<p>{html.escape(self.message)}</p>"

    def static_text(self) -> str:
        """The state as text, for a terminal."""
        return self.message

    def _ipython_display_(self, **_: Any) -> None:
        with self._lock:
            if not self._closed:
                self._follow()
            # A program that executes a notebook may miss updates, which arrive after the cell has ended.
            first = self.static_html()
        self._snapshot.display(super()._repr_mimebundle_(), first, {"text/plain": self.static_text()})
        with self._lock:
            self._snapshot_state = None
        self.refresh()

    def close(self) -> None:
        """Remove the panel from the browser and drop its waiting work; the session stays open."""
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
        """Read the changes of the session."""

    def _show(self) -> None:
        """Show the state; only send changes to the browser."""
        self._show_message()

    def _act(self, action: str, values: dict[str, Any]) -> None:
        """Perform a submitted action with the values of all inputs."""
        raise NotImplementedError

    def guarded(self, callback: Callable[..., object]) -> Callable[..., None]:
        """Wrap a callback so that its exceptions are shown in the panel."""

        @functools.wraps(callback)
        def call(*arguments: Any) -> None:
            try:
                callback(*arguments)
            except Exception as error:
                if not isinstance(error, GraftError):
                    logger.exception("a callback of the %s failed", type(self).__name__)
                # Not with say, which redraws everything: that may be what failed.
                panel = self if self._parent is None else self._parent
                with panel._lock:
                    panel._current_message, panel._message_later = (explain(error), "bad"), None
                    panel._show_message()

        return call

    def in_background(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call it on the panel's one background thread, after earlier calls."""
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
        text, status = (self._refresh_error, "bad") if self._refresh_error else self._current_message
        if self.closed_message and self.session.closed:
            text, status = self.closed_message, "quiet"
        self.set_trait("message", text)
        self.set_trait("status", status)
        role = "alert" if status == "bad" else "status"
        # Several lines are code with a caret below it, which needs a monospaced font.
        kind = f"{status} lines" if "\n" in text else status
        shown = f'<div class="{kind}" role="{role}">{html.escape(text)}</div>' if text else ""
        update(self._message_line, value=shown)


class FoldableBox(widgets.VBox):  # type: ignore[misc]
    """A button that shows and hides its content. The one of ipywidgets cannot be used by keyboard."""

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
        """The text on the button."""
        title: str = self._button.description
        return title

    @title.setter
    def title(self, title: str) -> None:
        self._button.description = title


def update(widget: Any, **values: Any) -> None:
    """Set several traits. Only changed values are sent to the browser."""
    for trait, value in values.items():
        setattr(widget, trait, value)


def close_all(widget: widgets.Widget) -> None:
    """Close a widget and its children, which ipywidgets leaves open."""
    if not isinstance(widget, Panel):
        for child in getattr(widget, "children", ()):
            close_all(child)
    widget.close()


def _watch(shown: Sequence[widgets.Widget], snapshot: str) -> list[widgets.Widget]:
    """A :class:`KernelWatch`, if the page needs anywidget for other widgets anyway: a front end may lack it."""
    if not any(_takes_anywidget(each) for each in shown):
        return []
    return [KernelWatch(snapshot)]


def _takes_anywidget(widget: widgets.Widget) -> bool:
    return widget.has_trait("_esm") or any(_takes_anywidget(each) for each in getattr(widget, "children", ()))


def row(*children: widgets.Widget) -> widgets.HBox:
    """Put widgets side by side, wrapping where space is short."""
    return widgets.HBox(children, layout=widgets.Layout(flex_flow="row wrap", align_items="center"))


# Colours come from JupyterLab's or VS Code's theme, or from the surrounding text. Signal colours are mixed with the
# text's: darker on a light page and lighter on a dark one.
PANEL_STYLE = """
.graftlab-panel {
  --gl-ink: var(--jp-ui-font-color1, var(--vscode-foreground, currentColor));
  --gl-pale: color-mix(in srgb, currentColor 75%, transparent);
  --gl-faint: var(--jp-ui-font-color2, var(--vscode-descriptionForeground, var(--gl-pale)));
  --gl-rule: var(--jp-border-color1, var(--vscode-widget-border, color-mix(in srgb, currentColor 30%, transparent)));
  --gl-fill: color-mix(in srgb, var(--gl-ink) 8%, transparent);
  --gl-bad: color-mix(in srgb, var(--jp-error-color1, var(--vscode-errorForeground, #e5484d)) 85%, var(--gl-ink));
  --gl-good: color-mix(in srgb, var(--jp-success-color1, #2f9e44) 70%, var(--gl-ink));
  --gl-warn: color-mix(in srgb, var(--jp-warn-color1, #e8890c) 60%, var(--gl-ink));
  --gl-accent: var(--jp-brand-color1, var(--vscode-focusBorder, #1976d2));
  --gl-code: var(--jp-code-font-family, var(--vscode-editor-font-family, monospace));
  max-width: 1100px; overflow: visible;
}
.graftlab-panel .widget-box, .graftlab-panel .jupyter-widget-box { overflow: visible }
.graftlab-panel .widget-html-content, .graftlab-panel .jupyter-widget-html-content {
  font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; color: var(--gl-ink); height: auto;
}
.graftlab-panel .quiet { color: var(--gl-faint) }
.graftlab-panel .bad { color: var(--gl-bad) }
.graftlab-panel .good, .graftlab-panel .everywhere b { color: var(--gl-good) }
.graftlab-panel .overtaken, .graftlab-panel .unapplied { color: var(--gl-warn) }
.graftlab-panel .graftlab-message .bad { white-space: pre-wrap; overflow-wrap: anywhere }
.graftlab-panel .graftlab-message .lines { font-family: var(--gl-code); font-size: 12px }
.graftlab-panel .graftlab-fold { margin: 6px 2px }
.graftlab-panel .graftlab-fold > .graftlab-fold-button {
  background: none; box-shadow: none; padding: 0 4px; text-align: left; color: var(--gl-ink);
}
.graftlab-panel .graftlab-fold > .graftlab-fold-button:hover { background: var(--gl-fill) }
.graftlab-panel .graftlab-fold > .widget-box { max-height: 320px; overflow-y: auto; padding: 4px 8px }
.graftlab-panel button:focus-visible, .graftlab-panel select:focus-visible, .graftlab-panel input:focus-visible,
.graftlab-panel summary:focus-visible, .graftlab-panel .graftlab-scrolls:focus-visible {
  outline: 2px solid var(--gl-accent); outline-offset: 1px;
}
.graftlab-panel .graftlab-scrolls { max-height: 380px; overflow: auto; border: 1px solid var(--gl-rule) }
.graftlab-panel .spinner {
  display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.5em; vertical-align: -0.1em;
  border: 2px solid var(--gl-rule); border-top-color: var(--gl-accent);
  border-radius: 50%; animation: graftlab-turn 0.9s linear infinite;
}
.graftlab-panel.jupyter-widgets-disconnected::before {
  content: "Not live: the kernel was restarted or has ended. Run the notebook from the cell that opens the session.";
  font: inherit; font-size: var(--jp-ui-font-size1, 13px); line-height: 1.5; color: var(--gl-bad); padding: 0 0 4px;
}
.graftlab-panel.jupyter-widgets-disconnected > * { opacity: 0.55; pointer-events: none }
.graftlab-panel .jupyter-widgets-disconnected::before { content: none; padding: 0 }
@keyframes graftlab-turn { to { transform: rotate(360deg) } }
@media (prefers-reduced-motion: reduce) { .graftlab-panel .spinner { animation: none } }
"""
