"""The Python processes that a warm script starts, such as a session server or torchrun's workers, warm too.

A process that has imported what the script has is forked off before the script begins, and children are forks of that.
To the script such a child is a ``subprocess.Popen``; its parent is the process that it is forked from.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kit import warm

# What this can do for a child. Any other is started by its path.
_OPTIONS = {"args", "env", "cwd", "stdin", "stdout", "stderr", "pass_fds", "start_new_session"}
_FLAGS = ("-P", "-u")
_popen = subprocess.Popen


def prepare() -> None:
    """Fork; the script continues, and its children are forks of the fork."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        # The stop button is for the script, and so are the ends of its pipes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        asked = warm.next_script(theirs.detach())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warm.run_as_main(asked)
        sys.exit()
    theirs.close()
    warm.nursery.cache_clear()
    forked_off = warm.Nursery(ours)
    warm.nursery = lambda: forked_off  # type: ignore[assignment]
    subprocess.Popen = Popen  # type: ignore[misc]


class Popen(_popen):  # type: ignore[type-arg]
    """``subprocess.Popen``, but warm for what is ``python -m MODULE`` or ``python FILE``."""

    def __new__(cls, args: Any, *more: Any, **options: Any) -> Any:
        rest = _of_python(args)
        if rest is None or more or not options.keys() <= _OPTIONS or not warm.may_be_warm(options.get("env")):
            return super().__new__(cls)
        return _start(rest, **options)


def _of_python(args: Any) -> list[str] | None:
    """The arguments of a command that starts Python, without its flags."""
    if not isinstance(args, (list, tuple)) or args[0] != sys.executable:
        return None
    rest = [str(each) for each in args[1:]]
    while rest and rest[0] in _FLAGS:
        rest.pop(0)
    return rest if rest and (rest[0] == "-m" or not rest[0].startswith("-")) else None


def _start(
    rest: Sequence[str],
    env: Any = None,
    cwd: Any = None,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> warm.Script:
    child = warm.Script(
        rest,
        os.environ if env is None else env,
        cwd,
        start_new_session,
        1 if stdout is None else stdout,
        2 if stderr is None else stderr,
        children=True,
        pass_fds=pass_fds,
    )
    if stdin == subprocess.PIPE:
        # As without ``text``.
        child.stdin = child.stdin.detach()  # type: ignore[assignment,attr-defined]
    else:
        child.stdin.close()
    return child
