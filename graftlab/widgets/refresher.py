"""The thread that keeps a session's widgets up to date: it refreshes each of them several times a second.

Widgets read the session; the session never calls widgets. So however fast ranks make rows, the interval bounds the
traffic to the browser, and the last state is always shown: the tick after a change shows it, and the tick after the
session has closed is the last.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
import weakref
from typing import Protocol

from graftlab.control.core import SessionCore
from graftlab.errors import GraftError

logger = logging.getLogger(__name__)

INTERVAL = 0.15
"""Seconds between two ticks."""


class RefreshTarget(Protocol):
    """A widget that a refresher keeps up to date."""

    def refresh(self) -> None:
        """Show changes. Called from the refresher's thread; cheap without changes."""

    def show_error(self, text: str) -> None:
        """Show why a refresh failed; an empty text means that it works again."""


class Refresher:
    """Refreshes the widgets that are added to it, every ``interval`` seconds, until they are removed.

    ``interval`` may change at any time, for example for a slow connection to the browser. The first tick comes after
    one interval, since a widget shows itself when it is made. A tick that takes longer than the interval is followed by
    a pause of the same length, so that the thread takes at most half a core. The thread runs while it has widgets and
    ends with a last refresh when the session is closed. An exception in a widget's ``refresh`` is shown in that widget
    and logged once; the other widgets are unaffected. All methods may be called from any thread.
    """

    def __init__(self, session: SessionCore, interval: float = INTERVAL) -> None:
        # Only widgets may keep the session alive.
        self._session = weakref.ref(session)
        self.interval = interval
        # Reentrant: ipywidgets closes an unreferenced widget again when the garbage collector runs, which may happen in
        # a thread that holds this lock.
        self._lock = threading.RLock()
        self._widgets: list[RefreshTarget] = []
        self._errors: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, widget: RefreshTarget) -> None:
        """Refresh ``widget`` from now on; only once if the session is already closed."""
        with self._lock:
            if widget not in self._widgets:
                self._widgets.append(widget)
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._keep_refreshing, args=(self._stop,), name="graftlab-refresher", daemon=True
                )
                self._thread.start()

    def remove(self, widget: RefreshTarget) -> None:
        """Stop refreshing ``widget``, without waiting for a running refresh."""
        with self._lock:
            if widget in self._widgets:
                self._widgets.remove(widget)
                self._errors.pop(id(widget), None)
            if not self._widgets:
                self._stop.set()
                self._thread = None

    def __contains__(self, widget: object) -> bool:
        """Whether this refresher has the widget."""
        with self._lock:
            return widget in self._widgets

    @property
    def running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None

    def tick(self) -> None:
        """Refresh every widget once, in the order in which they were added."""
        with self._lock:
            widgets = list(self._widgets)
        for widget in widgets:
            self._refresh(widget)

    def _keep_refreshing(self, stop: threading.Event) -> None:
        pause = self.interval
        while not stop.wait(pause):
            began = time.monotonic()
            session = self._session()
            # Read before the tick, so that the last tick shows the closed session.
            closed = session is None or session.closed
            del session
            if closed:
                self._refresh_for_the_last_time(stop)
                return
            self.tick()
            pause = max(self.interval, time.monotonic() - began)

    def _refresh_for_the_last_time(self, stop: threading.Event) -> None:
        while True:
            with self._lock:
                if not self._widgets:
                    if self._stop is stop:
                        self._thread = None
                    return
                widget = self._widgets.pop(0)
            self._refresh(widget)

    def _refresh(self, widget: RefreshTarget) -> None:
        before = self._errors.get(id(widget), "")
        try:
            widget.refresh()
            now = ""
        except Exception as error:
            now = explain(error)
            if now != before:
                logger.exception("%s could not be refreshed", type(widget).__name__)
        if now == before:
            return
        self._errors[id(widget)] = now
        try:
            widget.show_error(now)
        except Exception:
            logger.exception("%s could not show that: %s", type(widget).__name__, now)


_refreshers: weakref.WeakKeyDictionary[SessionCore, Refresher] = weakref.WeakKeyDictionary()
_refreshers_lock = threading.RLock()


def refresher_of(session: SessionCore) -> Refresher:
    """The session's refresher; all its widgets share it."""
    with _refreshers_lock:
        refresher = _refreshers.get(session)
        if refresher is None:
            refresher = _refreshers[session] = Refresher(session)
        return refresher


def explain(error: BaseException) -> str:
    """The text of an exception for a widget: graftlab's own messages unchanged, others with their location."""
    if isinstance(error, GraftError):
        return str(error)
    return "".join(traceback.format_exception(error, limit=-3)).rstrip()
