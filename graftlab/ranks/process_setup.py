"""How a fresh process becomes one in which a side's code can run, and ends when its notebook is gone."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from graftlab.ranks.options import RankSpec


def set_up_process(spec: RankSpec, store: str) -> None:
    """Take over the notebook's folder, import path and environment, and join the side's process group."""
    place = spec.place
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
    )
    sys.path[:] = spec.sys_path
    os.chdir(spec.cwd)
    # The forkserver's own method cannot start functions that a cell defines, such as a data loader's workers.
    multiprocessing.set_start_method(spec.multiprocessing, force=True)
    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        spec.backend,
        store=FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=spec.timeout),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_QuickFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger(__name__.partition(".")[0])
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False


class _QuickFormatter(logging.Formatter):
    """Formats date and time once per second: each graft logs a line, most of whose cost would be its time."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._shown},{int(record.msecs):03d}"


# ---- its end --------------------------------------------------------------------------------------------------------


def die_with_notebook(death_pipe: int) -> None:
    """Have the system kill this process's group when the notebook's end of the death pipe is closed, for any reason.

    The control thread ends the process too, but needs the interpreter, which code that hangs in C may hold forever; and
    the programs that the process has started would live on. Programs with their own session
    (``start_new_session=True``, ``setsid``) are in another group, and stay.
    """
    if hasattr(fcntl, "F_SETSIG"):  # Linux
        fcntl.fcntl(death_pipe, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(death_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(death_pipe, fcntl.F_SETFL, fcntl.fcntl(death_pipe, fcntl.F_GETFL) | os.O_ASYNC)


def end_programs_of(pid: int) -> None:
    """Kill the programs of a group leader that has ended; programs with their own session stay."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
