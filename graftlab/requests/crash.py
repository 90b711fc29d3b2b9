"""A last action before a signal or an uncaught exception ends the process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from graftlab.errors import DumpError
from graftlab.requests.pickling import describe

SIGNALS = (signal.SIGTERM, signal.SIGQUIT)


class CrashWatch:
    """Calls ``last_act(reason)`` on SIGTERM, SIGQUIT and an uncaught exception, and then lets the process end.

    ``last_act`` must not wait for a lock that the interrupted main thread may hold. A previous handler is called next;
    if the process survives it, ``went_on()`` is called. Without a previous handler the signal has its default effect,
    so that the exit code shows it. A signal that was ignored stays ignored. Handlers run in the main thread between two
    of its bytecodes: a main thread that hangs in C code keeps them from running. A handler that is installed later and
    does not call this one replaces it.
    """

    def __init__(self, last_act: Callable[[str], object], went_on: Callable[[], object]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise DumpError(
                "signals can only be watched from the main thread: make the dumper there, or call its "
                "dump_before_crash() from your own handlers"
            )
        self._last_act = last_act
        self._went_on = went_on
        self._on = True
        self._handlers: dict[int, Any] = {}
        for number in SIGNALS:
            before = signal.getsignal(number)
            # None is a handler that was not installed from Python and could not be called.
            if before not in (signal.SIG_IGN, None):
                self._handlers[number] = before
                signal.signal(number, self._on_signal)
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception

    def stop(self) -> None:
        """Restore the previous handlers; one that another handler was installed over only forwards from now on."""
        self._on = False
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        if threading.current_thread() is threading.main_thread():
            for number, before in self._handlers.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._handlers[number]
        if not self._on:
            self._let(before, number, frame)
            return
        self._last_act(f"signal {signal.Signals(number).name}")
        try:
            self._let(before, number, frame)
        finally:
            self._went_on()

    def _let(self, before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._hook(kind, error, trace)
        finally:
            if self._on:
                self._last_act(f"uncaught {describe(error)}")
