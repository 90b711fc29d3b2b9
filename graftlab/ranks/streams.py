"""A rank's standard streams: output goes to its log at once and to the notebook line by line; input is refused."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from graftlab.errors import SessionError

# A line of this length is sent unfinished, because a progress bar may never end its line.
_LONGEST = 1 << 16
# The notebook shows at most this much per second: more than a reader can follow, and sending more delays the model.
_LINES_A_SECOND = 10_000
_CHARACTERS_A_SECOND = 1 << 21
# Seconds between two displayed states of a progress bar.
_LIVE_INTERVAL = 0.2
# A log keeps its first and its last bytes, this many of each, once it has three times as many.
_KEPT = 8 << 20
_CHARACTERS_TO_A_CHECK = 1 << 20
_LEFT_OUT = re.compile(rb"\[graftlab: ([\d,]+) bytes of this log were left out here\]\n")


def redirect_to(log: str) -> None:
    """Make the standard streams of this process and its programs write to ``log``; there is no input."""
    log_descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log_descriptor, 1)
    os.dup2(log_descriptor, 2)
    os.close(log_descriptor)
    os.close(nothing)
    # A forked process has its parent's stream objects, so it needs new ones for the descriptors above.
    refuse_input()
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def shorten(log: TextIO) -> None:
    """Leave out the middle of a log that is too long, with a line that says how much that is.

    Does nothing to what is no file. What others write meanwhile may be lost. Raises OSError if another process or
    thread shortens the log.
    """
    found = os.fstat(log.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_size <= 3 * _KEPT:
        return
    with open(f"/proc/self/fd/{log.fileno()}", "r+b", buffering=0) as file:
        descriptor = file.fileno()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(descriptor).st_size
        first = os.pread(descriptor, _KEPT + 100, 0)
        before = _LEFT_OUT.search(first)
        cut = before.start() if before else first.rfind(b"\n", 0, _KEPT) + 1 or _KEPT
        begins = size - _KEPT
        last = os.pread(descriptor, _KEPT, begins)
        whole = last.find(b"\n") + 1
        begins += whole
        left_out = begins - cut + (int(before[1].replace(b",", b"")) - len(before[0]) if before else 0)
        mark = f"[graftlab: {left_out:,} bytes of this log were left out here]\n".encode()
        end = mark + last[whole:]
        os.pwrite(descriptor, end, cut)
        os.ftruncate(descriptor, cut + len(end))


class LabelledStream(io.TextIOBase):
    """Writes through to ``log``, and passes only whole lines of one thread at a time to ``send``.

    Lines that a progress bar rewrites go to ``show_live`` a few times per second, and to ``send`` when they are final.
    """

    def __init__(
        self, log: TextIO, send: Callable[[str], None], show_live: Callable[[str], None] = lambda text: None
    ) -> None:
        self._log = log
        self._send = send
        self._show_live = show_live
        self._live: dict[int, LiveLines] = {}
        self._next_live = 0.0
        # A signal handler may print in the middle of a print.
        self._lock = threading.RLock()
        self._unfinished: dict[int, str] = {}
        self._second, self._lines, self._characters = 0, 0, 0
        self._unchecked = 0
        self._has_reported_limit = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._log.fileno()

    def write(self, text: str) -> int:
        with self._lock:
            self._to_log(text)
            self._take(text)
        return len(text)

    def _take(self, text: str) -> None:
        thread = threading.get_ident()
        with self._lock:
            live = self._live.get(thread)
            if live is not None or is_live(text):
                self._write_live(thread, live, text)
                return
            pending = self._unfinished.pop(thread, "") + text
            whole, newline, rest = pending.rpartition("\n")
            if len(rest) > _LONGEST:
                whole, newline, rest = pending, "\n", ""
            if rest:
                self._unfinished[thread] = rest
        if newline:
            self._show(whole + newline)

    def _write_live(self, thread: int, live: LiveLines | None, text: str) -> None:
        if live is None:
            live = self._live[thread] = LiveLines()
            text = self._unfinished.pop(thread, "") + text
        elif live.is_over and not is_live(text) and text != "\n":
            # The bar has ended, so this is an ordinary line.
            self._end_live(thread)
            self._take(text)
            return
        done = live.write(text)
        if done:
            self._show(done)
        now = time.monotonic()
        if now >= self._next_live:
            self._next_live = now + _LIVE_INTERVAL
            self._show_live("\n".join(each.text for each in self._live.values()))

    def _end_live(self, thread: int) -> None:
        live = self._live.pop(thread)
        self._show_live("\n".join(each.text for each in self._live.values()))
        if live.text:
            self._show(live.text + "\n")

    def _to_log(self, text: str = "") -> None:
        # The disk may be full, or user code may have closed the descriptor, which is no reason to stop a model.
        with contextlib.suppress(OSError, ValueError):
            self._log.write(text) if text else self._log.flush()
            self._unchecked += len(text)
            if self._unchecked > _CHARACTERS_TO_A_CHECK:
                self._unchecked = 0
                shorten(self._log)

    def _show(self, text: str) -> None:
        second = int(time.monotonic())
        with self._lock:
            if second != self._second:
                self._second, self._lines, self._characters = second, 0, 0
            self._lines += text.count("\n")
            self._characters += len(text)
            if self._lines > _LINES_A_SECOND or self._characters > _CHARACTERS_A_SECOND:
                if self._has_reported_limit:
                    return
                self._has_reported_limit = True
                text = (
                    f"[graftlab: printed more than {_LINES_A_SECOND} lines or {_CHARACTERS_A_SECOND >> 20} MiB "
                    f"per second; the rest is only in the log of this rank]\n"
                )
        self._send(text)

    def flush(self) -> None:
        self._to_log()

    def flush_lines(self) -> None:
        """Send unfinished lines too, at the end of a run."""
        with self._lock:
            for thread in list(self._live):
                self._end_live(thread)
            unfinished, self._unfinished = self._unfinished, {}
        for text in unfinished.values():
            self._show(text + "\n")
        self._to_log()


# ---- lines that are rewritten in place ------------------------------------------------------------------------------

_PARTS = re.compile(r"\r|\n|\x1b\[A|\x1b\[[0-9;?]*[A-Za-z]|[^\r\n\x1b]+|\x1b")
_UP = "\x1b[A"
# Nested bars take a line each. Lines further up than this are final.
_MOST_LINES = 8
_WIDEST = 1000


def is_live(text: str) -> bool:
    """Whether the text moves back in its line, or to the previous one."""
    return "\r" in text.replace("\r\n", "\n") or _UP in text


class LiveLines:
    """A few lines of a terminal that progress bars rewrite in place, one line a bar."""

    def __init__(self) -> None:
        self._lines = [""]
        self._row = self._column = 0

    def write(self, text: str) -> str:
        """Write the text; returns the lines that have become final, with their line ends."""
        done = ""
        for part in _PARTS.findall(text.replace("\r\n", "\n")):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._row, self._column = self._row + 1, 0
                if self._row == len(self._lines):
                    self._lines.append("")
                if len(self._lines) > _MOST_LINES:
                    done += self._lines.pop(0).rstrip() + "\n"
                    self._row -= 1
            elif part == _UP:
                self._row = max(0, self._row - 1)
            elif not part.startswith("\x1b"):
                line = self._lines[self._row].ljust(self._column)
                self._lines[self._row] = (line[: self._column] + part + line[self._column + len(part) :])[:_WIDEST]
                self._column += len(part)
        return done

    @property
    def is_over(self) -> bool:
        """Whether the cursor is in an empty last line, as after a bar that has ended its line."""
        return self._row == len(self._lines) - 1 and self._column == 0 and not self._lines[-1] and self._row > 0

    @property
    def text(self) -> str:
        """The current lines."""
        return "\n".join(line.rstrip() for line in self._lines).rstrip("\n")


# ---- stdin ----------------------------------------------------------------------------------------------------------

_INPUT = (
    "input() cannot be answered on a rank, which has no terminal; pass the value as an argument "
    "(session.run(f, f, args=(...,))), or set a variable there with a %%graft cell"
)
_DEBUGGER = (
    "a debugger cannot be used on a rank, which has no terminal; `%graft debug target[0]` (session.post_mortem) "
    "inspects the frames of the last failure there, such as this one; `%graft stacks` (session.stacks()) shows where "
    "each rank is, and `%%graft target[0]` runs a cell on one rank"
)
_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "IPython.core.debugger"})


class RefusedInput(io.TextIOBase):
    """``sys.stdin`` of a rank, where each read raises :class:`SessionError`; it is not a terminal."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        _refuse()

    def read(self, size: int | None = -1, /) -> NoReturn:
        _refuse()


def refuse_input() -> None:
    """Refuse input and debuggers in this process from now on."""
    sys.stdin = RefusedInput()
    sys.breakpointhook = _breakpoint


def _breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise SessionError(_DEBUGGER)


def _refuse() -> NoReturn:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            raise SessionError(_DEBUGGER)
        frame = frame.f_back  # type: ignore[assignment]
    raise SessionError(_INPUT)
