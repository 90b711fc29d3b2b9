"""Where the threads of this process are in the code."""

from __future__ import annotations

import os
import sys
import threading
import traceback

# The frames below the user's code are the same on every rank, and of no interest.
_ABOVE_USER_CODE = frozenset(os.path.join(os.path.dirname(__file__), name) for name in ("worker.py", "workplace.py"))


def stacks_of_other_threads() -> str:
    """The stack of every thread but the one that asks, from the user's code on; ``idle`` where there is none of it."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        stack = traceback.extract_stack(frame)
        above = max((index for index, line in enumerate(stack) if line.filename in _ABOVE_USER_CODE), default=-1)
        lines = "".join(traceback.format_list(stack[above + 1 :])) or "  idle\n"
        parts.append(f"thread {names.get(ident, ident)}\n{lines}")
    return "\n".join(parts)
