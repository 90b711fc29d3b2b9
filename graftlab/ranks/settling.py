"""How a fresh process becomes one in which a side's code can run: environment, folder, process group, log."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from graftlab.ranks.spec import FDS_A_MESSAGE, RankSpec

# Where the system can do it at once, so that no program that starts meanwhile is handed them too.
_CLOSED_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    """What the notebook hands over before the first message. Raises EOFError when it is gone."""
    connection.setblocking(True)
    descriptors: list[int] = []
    while len(descriptors) < count:
        data, received, _, _ = socket.recv_fds(connection, 1, FDS_A_MESSAGE, _CLOSED_ON_EXEC)
        if not data:
            raise EOFError("the notebook was gone before this rank had started")
        descriptors += received
    return descriptors


def settle_in(spec: RankSpec, store: str) -> None:
    """Make this process what the notebook is: same folder, import path and environment; and join the side's group."""
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
    # The forkserver has put its own in place, which cannot start what a cell defines: a data loader's workers, say.
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
    """Formats date and time once a second: each graft logs a line, and its time would cost more than its rest."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._shown},{int(record.msecs):03d}"
