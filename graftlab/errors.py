"""Every exception that graftlab raises on purpose.

::

    GraftError
    |-- FilterError(ValueError)           a filter expression cannot be compiled
    |-- LayoutError(ValueError)           a layout cannot be read, or a tensor is not of the layout it is said to have
    |-- MatchError(ValueError)            what was given to be matched cannot be, or a proposal cannot be used like that
    |-- PlanError(ValueError)             a plan, or a part of it, is not usable
    |-- ConfigError(ValueError)           what a job is told of joining cannot be used, or the job is another
    |-- TransformError                    a transform cannot be loaded, or its result cannot be used
    |-- TagError(ValueError)              a tap was called with tags that it cannot have
    |-- GraftOverlapError(RuntimeError)   one tap matches both b2t and t2b
    |-- ShippingError(TypeError)          a function or value cannot travel to the ranks
    |-- RequestError(ValueError)          requests that cannot be told apart, served or replayed
    |-- DependencyError(ImportError)      an optional package is needed here and is not installed
    |-- DumpError                         recorded requests cannot be written where asked, or a file of them read
    |-- RecordingError                    a recording cannot be written, or a folder cannot be read as one
    |-- GraphError(ValueError)            a slot, a registry or a runner of captured graphs cannot be used like that
    |-- MessageError(ValueError)          what came over a connection is no message that is expected there
    |-- BufferFullError                   a sender's buffer had no room for a tensor within the time limit
    `-- SessionError(RuntimeError)
        |-- LaunchError                   the ranks could not be started
        |-- SessionBusyError              a run is still going on
        |-- SessionClosedError            the session, or a rank that is needed, is gone
        `-- RunError                      a function raised, or a rank died, during a run

    WaitInterrupted(KeyboardInterrupt)    the stop button ended a wait; what was waited for goes on
    GraftWarning(UserWarning)             something was skipped or done in another way than asked
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any


class GraftError(Exception):
    """The root of graftlab's own exceptions."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the message is written for the reader, the frames inside graftlab are not."""
        return [f"{type(self).__name__}: {self}"]


def _pointed(message: str, text: str, position: int) -> str:
    """The message, and below it the text with a mark under the fault."""
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
    """A layout cannot be read, or a tensor does not have the layout that it is said to have.

    For a text that cannot be read, ``text`` is the text and ``position`` the 0-based offset of the fault in it.
    """

    def __init__(self, message: str, text: str = "", position: int = 0) -> None:
        super().__init__(message, text, position)
        self.message = message
        self.text = text
        self.position = position

    def __str__(self) -> str:
        return _pointed(self.message, self.text, self.position)


class MatchError(GraftError, ValueError):
    """What was given to be matched cannot be, or a proposal cannot be used as asked."""


class PlanError(GraftError, ValueError):
    """A plan, or a part of it, is not usable."""


class ConfigError(GraftError, ValueError):
    """What a job is told of joining a graft world cannot be used, or does not fit the job or the other side."""


class RecordingError(GraftError):
    """A recording cannot be written, or a folder cannot be read as one; the message names the tap."""


class TransformError(GraftError):
    """A transform cannot be loaded, or what it returned cannot overwrite the target."""


class TagError(GraftError, ValueError):
    """A tap was called with tags that it cannot have."""


class GraftOverlapError(GraftError, RuntimeError):
    """One tap matches both the ``b2t`` and the ``t2b`` filter, so neither side would be the sender."""


class ShippingError(GraftError, TypeError):
    """A function or a value cannot travel between the notebook and the ranks."""


class RequestError(GraftError, ValueError):
    """Requests that cannot be told apart, served or replayed."""


class DependencyError(GraftError, ImportError):
    """An optional package is needed here and is not installed."""


class DumpError(GraftError):
    """Recorded requests cannot be written where they should go, or a file of them cannot be read.

    Of a file that cannot be read to its end, ``offset`` is the byte where reading stopped and ``requests`` are those
    that came whole before it; ``offset`` is None where the fault is not in the bytes.
    """

    def __init__(self, message: str, offset: int | None = None, requests: Sequence[Any] = ()) -> None:
        super().__init__(message, offset, requests)
        self.message = message
        self.offset = offset
        self.requests = list(requests)

    def __str__(self) -> str:
        return self.message


class GraphError(GraftError, ValueError):
    """A slot, a registry, a runner of captured graphs or a compiled program cannot be made, or used, as asked."""


class BufferFullError(GraftError):
    """A sender's buffer stayed full for the whole time limit; the tensor was not published."""


class MessageError(GraftError, ValueError):
    """What came over a connection is no message that is expected there."""


class SessionError(GraftError, RuntimeError):
    """The session cannot do what was asked."""


class LaunchError(SessionError):
    """The ranks could not be started."""


class SessionBusyError(SessionError):
    """A run is still going on, so the ranks cannot take another."""


class SessionClosedError(SessionError):
    """The session is closed, or a rank that is needed is gone."""


class RunError(SessionError):
    """A function raised, or a rank died, during a run. ``failures`` maps ``"target[1]"`` to what happened there."""

    def __init__(self, message: str, failures: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class WaitInterrupted(KeyboardInterrupt):
    """The stop button ended a wait; what was waited for goes on, and the message says how to get back to it."""

    def _render_traceback_(self) -> list[str]:
        """Short, as for :class:`GraftError`: whoever pressed stop knows where."""
        return [f"KeyboardInterrupt: {self}"]


class GraftWarning(UserWarning):
    """Something was skipped, or done in another way than asked; the run goes on."""


def warn(message: str) -> None:
    """Show a :class:`GraftWarning` that points at the user's own line, however far up it is."""
    level, frame = 1, sys._getframe()
    # torch's own frames lie in between where modules call hooks, and in compiled code, whose frames may have no module;
    # those of dataclasses where a plan is made of another, and IPython's where a magic does.
    between = ("graftlab", "torch", "dataclasses", "IPython")
    while frame.f_back is not None and frame.f_globals.get("__name__", "torch").partition(".")[0] in between:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, GraftWarning, stacklevel=level)
