"""The one thread that keeps a session's widgets up to date: it asks each of them, some times a second, to refresh.

Widgets look at the session, the session never calls widgets. So however fast ranks make rows, what the browser is
sent is bounded by the interval, and the last state is always shown: the tick after a change sees it, and the tick
after the session's end is the last one.
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
    """What a widget has, to be kept up to date."""

    def refresh(self) -> None:
        """Show what is new. Called from a thread of the refresher; cheap where nothing is new."""

    def show_error(self, text: str) -> None:
        """Show why a refresh failed; the empty text says that it works again."""


class Refresher:
    """Refreshes the widgets that are added to it, every ``interval`` seconds, until they are removed.

    ``interval`` may be changed at any time, as over a slow line to the browser. The first tick is an interval away, for
    a widget shows itself when it is made. A tick that takes longer than the interval is followed by a pause of the same
    length, so that half of one core is the most it ever takes. The thread runs while there are widgets and ends with a
    last refresh when the session is closed. An exception in a widget's ``refresh`` is shown in that widget and logged
    once, and the others go on. All methods may be called from any thread.
    """

    def __init__(self, session: SessionCore, interval: float = INTERVAL) -> None:
        # The widgets hold the session; the refresher alone must not.
        self._session = weakref.ref(session)
        self.interval = interval
        # Reentrant: ipywidgets closes a widget that nobody holds any more once again, at whatever moment the garbage
        # collector runs, so also in a thread that has this lock.
        self._lock = threading.RLock()
        self._widgets: list[RefreshTarget] = []
        self._errors: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def add(self, widget: RefreshTarget) -> None:
        """Refresh ``widget`` from now on; if the session is closed already, once."""
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
        """Leave ``widget`` alone from now on. A refresh of it that is going on in the thread is not waited for."""
        with self._lock:
            if widget in self._widgets:
                self._widgets.remove(widget)
                self._errors.pop(id(widget), None)
            if not self._widgets:
                self._stop.set()
                self._thread = None

    def __contains__(self, widget: object) -> bool:
        """Whether this widget is refreshed."""
        with self._lock:
            return widget in self._widgets

    @property
    def running(self) -> bool:
        """Whether there is anything left to refresh."""
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
            # Asked before the tick, so that the last tick shows the closed session.
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
    """What a widget shows of an exception: graftlab's own message as it is, anything else with where it came from."""
    if isinstance(error, GraftError):
        return str(error)
    return "".join(traceback.format_exception(error, limit=-3)).rstrip()
