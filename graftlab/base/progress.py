"""A progress bar for a wait that turns out to be long."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from graftlab.base.live import LiveText, publisher

# Shorter waits need no bar, and would only flicker.
PATIENCE = 1.0
# Seconds between two looks at the counter.
INTERVAL = 0.2
# Seconds without news until the bar says what is waited for.
SILENCE = 5.0
_SAID = 160


class LongWait:
    """Shows how many of ``what`` have come by now, once it has taken more than a second. For use in ``with``.

    ``total`` is how many there will be, if that is known. ``where`` says who waits for what, once nothing has come for
    some seconds.
    """

    def __init__(
        self,
        title: str,
        what: str,
        count: Callable[[], int],
        total: int | None = None,
        where: Callable[[], str] | None = None,
    ) -> None:
        self._title, self._what, self._count, self._total = title, what, count, total
        self._where = where
        self._bar: Any = None
        self._start = count()
        self._show_from = time.monotonic() + PATIENCE
        self._news_at = time.monotonic()

    def __enter__(self) -> LongWait:
        return self

    def next_look(self, remaining: float | None) -> float:
        """Bring the bar up to date; returns how many seconds to wait before the next call, at most ``remaining``."""
        now = time.monotonic()
        if self._bar is None and now >= self._show_from:
            self._bar = self._made()
        if self._bar is not None:
            self._count_up()
        pause = INTERVAL if self._bar is not None else self._show_from - now
        return max(0.0, pause if remaining is None else min(pause, remaining))

    def _made(self) -> Any:
        # Imported here because most waits are short, and this takes a moment.
        from tqdm.std import tqdm

        options: dict[str, Any] = {"desc": self._title, "total": self._total, "unit": f" {self._what}", "leave": False}
        if publisher() is None:
            # A file or a pipe should get none.
            return tqdm(**options, disable=not sys.stdout.isatty())
        place = LiveText()

        class Bar(tqdm):  # type: ignore[misc]
            """Lines of text in a cell's output, because a widget would be missing in the saved notebook."""

            def display(self, msg: str | None = None, pos: int | None = None) -> bool:
                place.show(str(self) if msg is None else msg)
                return True

        # Its own file would get the line that it clears at the end.
        return Bar(**options, file=io.StringIO(), ncols=100)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            # Count what came since the last look: a bar that closes short of its total would look like a failure.
            self._count_up()
            self._bar.close()

    def _count_up(self) -> None:
        more = self._count() - self._start - self._bar.n
        now = time.monotonic()
        if more:
            self._news_at = now
        silent = now - self._news_at
        said = self._where() if self._where is not None and silent >= SILENCE else ""
        said = f"nothing for {silent:.0f} s: {said}" if said else ""
        self._bar.set_postfix_str(said if len(said) <= _SAID else f"{said[:_SAID]}…", refresh=False)
        self._bar.update(more)
        # Of itself a bar to which nothing is added does not show that time goes by.
        self._bar.refresh()
