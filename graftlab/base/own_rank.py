"""Which rank of its job this process is, as the job itself knows."""

from __future__ import annotations

import os

import torch.distributed as dist

from graftlab.errors import ConfigError


def own_rank() -> tuple[int, int, str]:
    """The rank, how many there are, and what says so: the default process group, else ``RANK`` and ``WORLD_SIZE``.

    Raises :class:`ConfigError` where those two are no rank of a job.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), "its default process group"
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return 0, 1, "RANK and WORLD_SIZE, which are not set"
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(f"RANK={rank!r} and WORLD_SIZE={size!r} are no rank of a job; unset them, or set both")
    return int(rank), int(size), "the environment's WORLD_SIZE"
