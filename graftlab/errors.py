"""Every exception that graftlab raises on purpose.

::

    GraftError
    |-- FilterError(ValueError)           a filter expression cannot be compiled
    |-- LayoutError(ValueError)           a layout cannot be read, or a tensor does not have its declared layout
    |-- MatchError(ValueError)            the inputs cannot be matched, or a proposal does not support the call
    |-- PlanError(ValueError)             a plan, or a part of it, is invalid
    |-- ConfigError(ValueError)           a job's configuration is invalid, or does not fit the job or the other side
    |-- TransformError                    a transform cannot be loaded, or its result cannot be used
    |-- TagError(ValueError)              a tap was called with invalid tags
    |-- GraftOverlapError(RuntimeError)   one tap matches both b2t and t2b
    |-- ShippingError(TypeError)          a function or value cannot travel to the ranks
    |-- RequestError(ValueError)          requests cannot be identified, served or replayed
    |-- DependencyError(ImportError)      a required optional package is not installed
    |-- DumpError                         recorded requests cannot be written, or a file of them cannot be read
    |-- RecordingError                    a recording cannot be written, or a folder cannot be read as one
    |-- GraphError(ValueError, RuntimeError) a slot, registry or runner of captured graphs is misused
    |-- MessageError(ValueError)          a connection received bytes that are not an expected message
    |-- BufferFullError                   a sender's buffer had no room for a tensor within the time limit
    `-- SessionError(RuntimeError)
        |-- LaunchError                   the ranks could not be started
        |-- SessionBusyError              a run is still in progress
        |-- SessionClosedError            the session, or a required rank, is gone
        `-- RunError                      a function raised, or a rank died, during a run

    WaitInterrupted(KeyboardInterrupt)    the stop button ended a wait, and the message says what continues
    GraftWarning(UserWarning)             something was skipped, or done differently from the request
"""

from __future__ import annotations

import html
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any


class GraftError(Exception):
    """The root of graftlab's own exceptions."""

    def _render_traceback_(self) -> list[str]:
        """Show the message alone in IPython, because graftlab's own frames tell the reader nothing."""
        return [f"{type(self).__name__}: {self}"]


def _pointed(message: str, text: str, position: int) -> str:
    """The message, followed by the text with a caret under the fault."""
    if not text:
        return message
    # One line of context is enough to see the fault, however much was pasted.
    start = max(0, position - 60)
    line = text[start : position + 60].replace("\n", " ")
    caret = " " * (position - start) + "^"
    return f"{message} (at position {position})\n    {line}\n    {caret}"


class FilterError(GraftError, ValueError):
    """A filter expression cannot be compiled.

    ``expression`` is the text that was refused and ``position`` the 0-based offset of the fault in it.
    """

    def __init__(self, message: str, expression: str = "", position: int = 0) -> None:
        super().__init__(message, expression, position)
        self.message = message
        self.expression = expression
        self.position = position

    def __str__(self) -> str:
        return _pointed(self.message, self.expression, self.position)


class LayoutError(GraftError, ValueError):
    """A layout cannot be read, or a tensor does not have its declared layout.

    If a layout's text cannot be read, ``text`` is that text and ``position`` the 0-based offset of the fault in it.
    """

    def __init__(self, message: str, text: str = "", position: int = 0) -> None:
        super().__init__(message, text, position)
        self.message = message
        self.text = text
        self.position = position

    def __str__(self) -> str:
        return _pointed(self.message, self.text, self.position)


class MatchError(GraftError, ValueError):
    """The inputs cannot be matched, or a proposal does not support the call."""


class PlanError(GraftError, ValueError):
    """A plan, or a part of it, is invalid."""


class ConfigError(GraftError, ValueError):
    """A job's configuration for joining a graft world is invalid, or does not fit the job or the other side."""


class RecordingError(GraftError):
    """A recording cannot be written, or a folder cannot be read as one; the message names the tap."""


class TransformError(GraftError):
    """A transform cannot be loaded, or what it returned cannot overwrite the target."""


class TagError(GraftError, ValueError):
    """A tap was called with invalid tags."""


class GraftOverlapError(GraftError, RuntimeError):
    """One tap matches both the ``b2t`` and the ``t2b`` filter, so there is no single sender."""


class ShippingError(GraftError, TypeError):
    """A function or a value cannot travel between the notebook and the ranks."""


class RequestError(GraftError, ValueError):
    """Requests cannot be identified, served or replayed."""


class DependencyError(GraftError, ImportError):
    """A required optional package is not installed."""


class DumpError(GraftError):
    """Recorded requests cannot be written, or a file of them cannot be read.

    If a file cannot be read to its end, ``offset`` is the byte where reading stopped and ``requests`` are the complete
    requests before it; ``offset`` is None if the fault is not in the bytes.
    """

    def __init__(self, message: str, offset: int | None = None, requests: Sequence[Any] = ()) -> None:
        super().__init__(message, offset, requests)
        self.message = message
        self.offset = offset
        self.requests = list(requests)

    def __str__(self) -> str:
        return self.message


class GraphError(GraftError, ValueError, RuntimeError):
    """A slot, a registry, a runner of captured graphs or a compiled program cannot be made or used in this way."""


class BufferFullError(GraftError):
    """A sender's buffer stayed full for the whole time limit; the tensor was not published."""


class MessageError(GraftError, ValueError):
    """A connection received bytes that are not a message expected at that point."""


class SessionError(GraftError, RuntimeError):
    """The session cannot do what the call requests."""


class LaunchError(SessionError):
    """The ranks could not be started."""


class SessionBusyError(SessionError):
    """A run is still in progress, so the ranks cannot start another."""


class SessionClosedError(SessionError):
    """The session is closed, or a required rank is gone."""


class RunError(SessionError):
    """A function raised, or a rank died, during a run. ``failures`` maps labels such as ``"target[1]"`` to failures."""

    def __init__(self, message: str, failures: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}
        self._is_folded = False

    def _render_traceback_(self) -> list[str]:
        """Show the message in IPython without torch's frames; a notebook shows the whole one behind a line."""
        text = f"{type(self).__name__}: {self}"
        shown, hidden = without_torch(text)
        # A kernel renders an error twice: for the cell, and for its reply.
        if hidden and not self._is_folded:
            self._is_folded = True
            _show_folded(f"the whole traceback, with {hidden} frames of torch", text)
        return [shown]


# A frame of a formatted traceback: its first line, and its source with marks below it.
_OF_TORCH = re.compile(
    r'(?:^ *File "[^"\n]*[/\\]site-packages[/\\]torch[/\\][^"\n]*", line .*\n(?:^ {4,}(?!File ").*\n)*)+', re.MULTILINE
)


def without_torch(traceback: str) -> tuple[str, int]:
    """A formatted traceback with a line instead of torch's frames one after the other, and how many those are."""
    hidden = 0

    def line(found: re.Match[str]) -> str:
        nonlocal hidden
        frames = len(re.findall(r'^ *File "', found[0], re.MULTILINE))
        hidden += frames
        return f"  ... {frames} {'frame' if frames == 1 else 'frames'} of torch\n"

    return _OF_TORCH.sub(line, traceback), hidden


def _show_folded(title: str, text: str) -> None:
    """Show a text in a notebook behind a line that expands; do nothing elsewhere."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    if getattr(shell, "kernel", None) is None:
        return
    folded = f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
    shell.display_pub.publish({"text/html": folded, "text/plain": title})


class WaitInterrupted(KeyboardInterrupt):
    """The stop button ended a wait. The message says what continues, and how to wait again, or what was stopped."""

    def _render_traceback_(self) -> list[str]:
        """Show one line: the user who pressed stop knows where the wait was."""
        return [f"KeyboardInterrupt: {self}"]


class GraftWarning(UserWarning):
    """Something was skipped, or done differently from the request; the run continues."""


def warn(message: str) -> None:
    """Show a :class:`GraftWarning` that points at the user's own line."""
    level, frame = 1, sys._getframe()
    # Frames between the user's line and here: torch's, where modules call hooks or code is compiled (frames that may
    # have no module name); those of dataclasses, where one plan is made from another; and IPython's, for a magic.
    between = ("graftlab", "torch", "dataclasses", "IPython")
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in between:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraftWarning, stacklevel=level)
