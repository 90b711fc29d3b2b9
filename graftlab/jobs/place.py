"""Which rank of its side this process is, as the job itself knows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from graftlab.base.own_rank import own_rank
from graftlab.base.world import Place, Side
from graftlab.config import GraftConfig
from graftlab.errors import ConfigError


def place_of(config: GraftConfig) -> Place:
    """Where this process stands: by its default process group, else by ``RANK`` and ``WORLD_SIZE``, else alone.

    Raises :class:`ConfigError` where the job has another number of processes than the config says.
    """
    config.require_complete()
    side = config.side
    other: Side = "target" if side == "baseline" else "baseline"
    rank, size, source = own_rank()
    expected = config.world_size(side)
    if size != expected:
        raise ConfigError(
            f"{side}_world_size (GRAFTLAB_{side.upper()}_WORLD_SIZE) is {expected}, and this job has {size} "
            f"{'process' if size == 1 else 'processes'}, by {source}; make the two agree"
        )
    return Place(side, rank, size, config.world_size(other))


def own_device() -> torch.device:
    """The device that this process computes on, as far as one can tell without using it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def own_backend() -> str:
    """The collective backend of the job's default process group."""
    return dist.get_backend() if dist.is_available() and dist.is_initialized() else "none"
