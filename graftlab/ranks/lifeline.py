"""Has the system end a process, and the programs that it started, when its notebook is gone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal


def die_with_the_notebook(lifeline: int) -> None:
    """Have the system kill this process's group when the notebook's end of the lifeline is closed, by whatever death.

    The desk ends the process too, but needs the interpreter for it; code that hangs in C without letting go of it would
    live on forever, and so would the programs that the process has started. What began a session of its own
    (``start_new_session=True``, ``setsid``) is in another group, and stays.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def end_what_it_started(pid: int) -> None:
    """Kill the programs of a process that led a group and has ended; those of a session of their own stay."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
