"""Which rank of its job this process is, and its device and backend, as torch or the environment reports them."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from graftlab.base.world import Place, other_side
from graftlab.config import GraftConfig
from graftlab.errors import ConfigError


def own_rank() -> tuple[int, int, str]:
    """The rank, the world size and their source: the default process group, else ``RANK`` and ``WORLD_SIZE``.

    Raises :class:`ConfigError` where those two variables do not name a rank of a job.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), "its default process group"
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or size is None:
        return 0, 1, "RANK and WORLD_SIZE, which are not set"
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(f"RANK={rank!r} and WORLD_SIZE={size!r} do not name a rank of a job; unset them, or set both")
    return int(rank), int(size), "the environment's WORLD_SIZE"


def place_of(config: GraftConfig) -> Place:
    """This process's place in the graft world: its rank by :func:`own_rank`, the world sizes by the config.

    Raises :class:`ConfigError` where the job's number of processes differs from the config's.
    """
    config.require_complete()
    side = config.side
    other = other_side(side)
    rank, size, source = own_rank()
    expected = config.world_size(side)
    if size != expected:
        raise ConfigError(
            f"{side}_world_size (GRAFTLAB_{side.upper()}_WORLD_SIZE) is {expected}, and this job has {size} "
            f"{'process' if size == 1 else 'processes'}, by {source}; make the two agree"
        )
    return Place(side, rank, size, config.world_size(other))


def own_device() -> torch.device:
    """The device that this process computes on, determined without initialising CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def own_backend() -> str:
    """The collective backend of the job's default process group."""
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"
