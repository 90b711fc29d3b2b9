"""The forkserver's last import: lets it outlive a killed notebook and remove that notebook's temporary folder.

multiprocessing makes a folder ``pymp-*`` for the forkserver's socket, and removes it when the notebook's process exits
normally. This module also notes all earlier imports for the ranks, and hides them from their garbage collectors.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import shutil
import signal

from graftlab.ranks.edited_modules import note_before_forks
from graftlab.ranks.preload_first import VARIABLE, on_interrupt

# Milliseconds until a notebook that closed its connection has ended; one that only stopped its forkserver stays.
_PATIENCE = 1000


def remove_after(pid: int, folder: str) -> None:
    """When this process ends, remove the folder of the process ``pid``, if it has ended too."""
    try:
        notebook = os.pidfd_open(pid)
    except (AttributeError, OSError):  # another system
        return
    own = os.getpid()

    def remove() -> None:
        # Ranks are forks of this process, and must not remove the folder.
        if os.getpid() != own:
            return
        poller = select.poll()
        poller.register(notebook, select.POLLIN)
        if poller.poll(_PATIENCE):
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    os.register_at_fork(after_in_child=lambda: os.close(notebook))


if VARIABLE in os.environ:
    # Not above: a notebook imports this module, and need not import torch yet.
    from graftlab.plan.plan import GraftPlan
    from graftlab.ranks.process_setup import choose_level

    choose_level()
    # What Python learns from a first plan, such as which types are mappings, all ranks know.
    GraftPlan()
    note_before_forks()
    gc.enable()
    # Otherwise the collectors of the ranks would write to the memory of torch's objects, and so copy it.
    gc.freeze()
    # From here on multiprocessing ignores interrupts, and restores this handler in each rank.
    signal.signal(signal.SIGINT, on_interrupt)
    _pid, _, _folder = os.environ.pop(VARIABLE).partition(os.pathsep)
    remove_after(int(_pid), _folder)
