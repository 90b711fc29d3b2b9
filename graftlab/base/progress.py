"""A progress bar for a wait that turns out to be long."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from graftlab.base.live import LiveText, publisher

# Shorter waits need no bar, and would only flicker.
PATIENCE = 1.0
# Seconds between two reads of the counter.
INTERVAL = 0.2
# Seconds without progress until the bar says what it waits for.
SILENCE = 5.0
_LONGEST = 160

_report: Callable[[str], None] | None = None


@contextlib.contextmanager
def reported_to(report: Callable[[str], None]) -> Iterator[None]:
    """Pass the titles of waits to a function, again and again while they last, in place of a bar for each."""
    global _report
    before, _report = _report, report
    try:
        yield
    finally:
        _report = before


def report_progress(title: str) -> None:
    """Report what is computed at the moment where the titles of waits are reported, too; elsewhere do nothing."""
    if _report is not None:
        _report(title)


class LongWait:
    """Shows a count of ``what`` during a wait of more than a second. Use it as a context manager.

    ``total`` is the expected count, if it is known. ``where`` describes who waits for what; its text is shown after
    some seconds without progress. Another thread can end the wait: once ``stop`` is set, it raises KeyboardInterrupt,
    as the stop button does in the notebook's own thread.
    """

    def __init__(
        self,
        title: str,
        what: str,
        count: Callable[[], int],
        total: int | None = None,
        where: Callable[[], str] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._stop = stop
        self._title, self._what, self._count, self._total = title, what, count, total
        self._where = where
        self._bar: Any = None
        self._start = count()
        self._show_from = time.monotonic() + PATIENCE
        self._news_at = time.monotonic()

    def __enter__(self) -> LongWait:
        # Here too, because a wait may be over before its first look.
        self._end_if_stopped()
        report_progress(self._title)
        return self

    def next_look(self, remaining: float | None) -> float:
        """Update the bar; returns the seconds to wait before the next call, at most ``remaining``."""
        self._end_if_stopped()
        now = time.monotonic()
        if _report is not None:
            _report(self._title)
            return INTERVAL if remaining is None else max(0.0, min(INTERVAL, remaining))
        if self._bar is None and now >= self._show_from:
            self._bar = self._made()
        if self._bar is not None:
            self._count_up()
        pause = INTERVAL if self._bar is not None else self._show_from - now
        return max(0.0, pause if remaining is None else min(pause, remaining))

    def _end_if_stopped(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise KeyboardInterrupt

    def _made(self) -> Any:
        # Imported here because most waits are short, and this takes a moment.
        from tqdm.std import tqdm

        options: dict[str, Any] = {"desc": self._title, "total": self._total, "unit": f" {self._what}", "leave": False}
        if publisher() is None:
            # No bar in a file or a pipe.
            return tqdm(**options, disable=not sys.stdout.isatty())
        place = LiveText()

        class Bar(tqdm):  # type: ignore[misc]
            """A bar of text in a cell's output, because a saved notebook cannot show a widget."""

            def display(self, msg: str | None = None, pos: int | None = None) -> bool:
                place.show(str(self) if msg is None else msg)
                return True

        # The default file would receive the line that tqdm clears at the end.
        return Bar(**options, file=io.StringIO(), ncols=100)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            # Include the last items: a bar that closes below its total would look like a failure.
            self._count_up()
            self._bar.close()

    def _count_up(self) -> None:
        more = self._count() - self._start - self._bar.n
        now = time.monotonic()
        if more:
            self._news_at = now
        silent = now - self._news_at
        reason = self._where() if self._where is not None and silent >= SILENCE else ""
        reason = f"nothing for {silent:.0f} s: {reason}" if reason else ""
        self._bar.set_postfix_str(reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}…", refresh=False)
        self._bar.update(more)
        # Without a refresh, a bar that receives no items does not show the elapsed time.
        self._bar.refresh()
