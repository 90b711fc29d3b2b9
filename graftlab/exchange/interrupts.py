"""Where an exception from outside may be raised without harm to an exchange: the stop button's, say.

Raised at any other moment it could leave half of a frame on the wire, or lose one that was just taken off it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])

_PACKAGE = __name__.rpartition(".")[0] + "."
_waits: set[CodeType] = set()


def interruptible(function: _F) -> _F:
    """Mark a function of an exchange that does nothing but wait, so that an exception raised in it loses nothing."""
    _waits.add(function.__code__)
    return function


def is_interruptible_at(frame: FrameType | None) -> bool:
    """Whether a signal handler that was called at this frame may raise: no exchange is at work, or it merely waits.

    Costs the exchanges nothing: it is the stack that tells.
    """
    if frame is not None and frame.f_code in _waits:
        return True
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            return False
        frame = frame.f_back
    return True
