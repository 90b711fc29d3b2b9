"""Whether a backward pass is running, and what it has passed to the code that taps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch.utils.module_tracker import ModuleTracker

from graftlab.base.tensor_bytes import memory_of

# Only queried. It would install hooks when entered, which never happens.
_tracker = ModuleTracker()

ENGINE = "_engine_run_backward"
"""The function in which torch runs autograd's engine."""
IN_A_HOOK = (
    "other branches of autograd's graph may share this gradient, so only gl.tap's result has the graft; return that "
    "from the hook"
)
"""The warning where a gradient is grafted that autograd has passed to a hook."""


def is_backward() -> bool:
    """Whether this thread runs a backward pass of autograd's engine."""
    return bool(_tracker.is_bw)


def frame_in_backward(thread: int) -> FrameType | None:
    """The frame in which this thread runs autograd's engine, or waits for it; None if it does neither.

    The engine computes the gradients of a GPU's tensors on threads of its own, whose stacks have no such frame.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != ENGINE:
        frame = frame.f_back
    return frame


def is_passed_by_autograd(gradient: torch.Tensor) -> bool:
    """Whether autograd's engine passed this tensor, or one with its memory, to the hook that runs now on this thread.

    The engine may pass the same tensor to other branches of the graph.
    """
    if not is_backward() or (gradient.is_leaf and gradient.requires_grad):
        return False
    memory = memory_of(gradient)
    return memory is not None and any(memory_of(each) == memory for each in _passed(_called_by_engine()))


def _called_by_engine() -> FrameType:
    """The frame of the Python function that the engine has called: its thread's first one, or above torch's call."""
    frame = sys._getframe()
    while (caller := frame.f_back) is not None and caller.f_globals.get("__name__") != "torch.autograd.graph":
        frame = caller
    return frame


def _passed(frame: FrameType) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of this frame's function, also those in a tuple, as ``*args`` are."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    for value in (frame.f_locals.get(name) for name in names):
        yield from (
            each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, torch.Tensor)
        )
