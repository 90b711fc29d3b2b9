"""Run by the forkserver alone, which outlives a notebook that was killed: removes what that could not.

multiprocessing makes a folder ``pymp-*`` for the forkserver's socket, and removes it when the notebook's process ends
as it should. The forkserver imports this last, so it also keeps all that was imported before from being looked through
by the garbage collectors of the ranks.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import shutil
import signal

from graftlab.ranks.preload_first import VARIABLE, on_interrupt

# Milliseconds in which a process that has hung up is gone; one that only ends its forkserver stays.
_PATIENCE = 1000


def remove_after(pid: int, folder: str) -> None:
    """When this process ends, remove the folder of the process with this number, if that is gone."""
    try:
        notebook = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system
        return
    own = os.getpid()

    def remove() -> None:
        # Ranks are forks of this process, and their end says nothing.
        if os.getpid() != own:
            return
        poller = select.poll()
        poller.register(notebook, select.POLLIN)
        if poller.poll(_PATIENCE):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.register_at_fork(after_in_child=lambda: os.close(notebook))


if VARIABLE in os.environ:
    gc.enable()
    # Or each rank would copy the memory that torch's own objects lie in, to count their references.
    gc.freeze()
    # multiprocessing ignores it from here on, and gives it back to each rank.
    signal.signal(signal.SIGINT, on_interrupt)
    _pid, _, _folder = os.environ.pop(VARIABLE).partition(os.pathsep)
    remove_after(int(_pid), _folder)
