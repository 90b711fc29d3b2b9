"""Has the system end a process whose notebook is gone."""

from __future__ import annotations

import fcntl
import os
import signal


def die_with_the_notebook(lifeline: int) -> None:
    """Have the system kill this process when the notebook's end of the lifeline is closed, by whatever death.

    The desk does the same, but needs the interpreter for it; code that hangs in C without letting go of it would
    live on forever.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
