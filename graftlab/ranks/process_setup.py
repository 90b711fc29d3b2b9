"""Prepares a fresh process to run a side's code."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from graftlab.base.world import Place
from graftlab.ranks.options import RankSpec

_PACKAGE = logging.getLogger(__name__.partition(".")[0])


def set_up_process(spec: RankSpec, store: str) -> None:
    """Take over the notebook's folder, import path and environment, and join the side's process group."""
    os.environ.clear()
    os.environ.update(spec.environ)
    sys.path[:] = spec.sys_path
    os.chdir(spec.cwd)
    # With the forkserver's start method a data loader could not start workers whose functions a cell defines.
    multiprocessing.set_start_method(spec.multiprocessing, force=True)
    join_process_group(
        spec.place,
        torch.device(spec.device),
        spec.backend,
        FileStore(store, spec.place.world_size),
        timeout=spec.timeout,
        threads=spec.threads,
        local=(spec.place.rank, spec.place.world_size),
    )
    log_to_stderr()


def join_process_group(
    place: Place,
    device: torch.device,
    backend: str,
    store: Store,
    *,
    timeout: float,
    threads: int,
    local: tuple[int, int],
) -> None:
    """Make this process the rank of its side's default process group, with the variables that launchers set.

    ``timeout`` is in seconds; ``local`` is the rank among its side's ranks on this machine, and their number.
    """
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_WORLD_SIZE": str(local[1]),
    }
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout),
    )


def log_to_stderr() -> None:
    """Write the package's messages to standard error, and so to the rank's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_QuickFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    choose_level()
    _PACKAGE.addHandler(handler)
    _PACKAGE.propagate = False


def choose_level() -> None:
    """Let the package's messages through that a rank's log has.

    The forkserver calls this for its ranks: a new level writes to all loggers of the process, and so each rank would
    copy the memory that they share.
    """
    if _PACKAGE.level != logging.INFO:
        _PACKAGE.setLevel(logging.INFO)


class _QuickFormatter(logging.Formatter):
    """Formats date and time once per second: each graft logs a line, and formatting its time would cost the most."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._shown},{int(record.msecs):03d}"
