"""Where a rank's code is and where it failed: the stacks of its threads, and pdb on the frames of its last failure."""

from __future__ import annotations

import io
import os
import pdb
import sys
import threading
import traceback
from types import TracebackType

from graftlab.errors import SessionError

# These would resume the failed code, or wait for input from a terminal.
_REFUSED = frozenset(
    {"c", "cont", "continue", "n", "next", "s", "step", "r", "return", "unt", "until", "j", "jump", "run", "restart"}
    | {
        "interact",
        "debug",
        "b",
        "break",
        "tbreak",
        "cl",
        "clear",
        "commands",
        "condition",
        "disable",
        "enable",
        "ignore",
    }
    | {"q", "quit", "exit", "EOF"}
)
_LONGEST = 20_000
# Seconds that a command waits for the previous one.
_PATIENCE = 2.0
_ABOVE_USER_CODE = frozenset(os.path.join(os.path.dirname(__file__), name) for name in ("worker.py", "namespace.py"))


class LastFailure:
    """Keeps the exception that ended the last run, with its frames, until the next run."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._kept: tuple[BaseException, pdb.Pdb] | None = None

    def keep(self, error: BaseException) -> None:
        trace = _from_user_code(error.__traceback__)
        debugger = pdb.Pdb(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True, readrc=False)
        debugger.reset()
        debugger.setup(None, trace)
        self._kept = error, debugger

    def forget(self) -> None:
        """Release the frames, and the tensors in them."""
        if self._kept is not None:
            # Python 3.13's pdb keeps its current frame in the globals of that frame's module.
            for frame, _ in self._kept[1].stack:
                frame.f_globals.pop("__pdb_convenience_variables", None)
        self._kept = None

    def ask(self, command: str) -> str:
        """Return pdb's output for ``w``, ``u``, ``d``, ``l``, ``ll``, ``a``, ``p EXPR``, ``pp EXPR``, or an expression.

        Without a command: the exception, and where it was raised. Raises :class:`SessionError` where no failure is
        kept, and for commands that would resume the code.
        """
        if not self._asking.acquire(timeout=_PATIENCE):
            raise SessionError("the previous command is still running here; session.restart() ends it")
        try:
            text = self._answer(command.strip())
        finally:
            self._asking.release()
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n[and {len(text) - _LONGEST:,} more characters]"

    def _answer(self, command: str) -> str:
        if self._kept is None:
            raise SessionError("no failure is kept: nothing failed on this rank in the newest run")
        error, debugger = self._kept
        word = command.partition(" ")[0]
        if word in _REFUSED:
            raise SessionError(
                f"{word}: failed code cannot be resumed; use w, u, d, l, ll, a, p EXPR, pp EXPR, !STATEMENT"
            )
        debugger.stdout = out = io.StringIO()
        if not command:
            out.write("".join(traceback.format_exception_only(error)))
        debugger.onecmd(command or "w")
        return out.getvalue().rstrip("\n")


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Skip the frames above the user's own code; a traceback without any stays whole."""
    at, below = trace, trace
    while at is not None:
        if at.tb_frame.f_code.co_filename in _ABOVE_USER_CODE:
            below = at.tb_next
        at = at.tb_next
    return below or trace


# ---- stacks ---------------------------------------------------------------------------------------------------------


def stacks_of_other_threads() -> str:
    """Format the stacks of all other threads, from the user's code on; ``idle`` for a thread without user code."""
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
