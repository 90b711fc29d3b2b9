"""Tells a signal handler where it may raise an exception without harm to an exchange.

Anywhere else the exception could leave half a frame on the wire, or lose a frame that has just been read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

_F = TypeVar("_F", bound=Callable[..., object])

_PACKAGE = __name__.rpartition(".")[0] + "."
_waits: set[CodeType] = set()


def interruptible(function: _F) -> _F:
    """Mark a function of an exchange that only waits, so that an exception raised in it loses nothing."""
    _waits.add(function.__code__)
    return function


def is_interruptible_at(frame: FrameType | None) -> bool:
    """Whether a signal handler called at this frame may raise: no exchange is on the stack, or it only waits.

    It reads the stack, so the exchanges pay nothing for it.
    """
    if frame is not None and frame.f_code in _waits:
        return True
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_PACKAGE):
            return False
        frame = frame.f_back
    return True
