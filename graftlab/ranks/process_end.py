"""Ends a process together with its notebook, and the programs that it has started with it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal


def die_with_notebook(death_pipe: int) -> None:
    """Have the system kill this process's group when the notebook's end of the death pipe is closed, for any reason.

    The control thread ends the process too, but needs the interpreter, which code that hangs in C may hold forever. It
    also cannot end the programs that the process has started. Programs with their own session (``setsid``) stay.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(death_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(death_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(death_pipe, fcntl.F_SETFL, fcntl.fcntl(death_pipe, fcntl.F_GETFL) | os.O_ASYNC)


def end_programs_of(pid: int) -> None:
    """Kill the programs of a group leader that has ended; programs with their own session stay."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
