"""Which device and which collective backend each rank gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from graftlab.base.world import Place
from graftlab.errors import LaunchError


@dataclass(frozen=True)
class DeviceAssignment:
    """One rank's device (``"cpu"``, ``"cuda:1"``) and backend, with notes for the user about the choice."""

    device: str
    backend: str
    notes: tuple[str, ...] = ()


def assign_devices(places: list[Place], device: str | None, backend: str | None) -> list[DeviceAssignment]:
    """Assign a device to each place.

    ``device`` is ``"cpu"``, ``"cuda"`` (spread in turn), ``"cuda:N"`` (all on one), or None for the GPUs if there are
    any. Where ranks of one side share a GPU their group falls back from nccl, which refuses that, to gloo. Raises
    :class:`LaunchError` for a device or backend that is not available.
    """
    gpus = torch.cuda.device_count()
    kind, _, index = (device or ("cuda" if gpus else "cpu")).partition(":")
    if kind not in ("cpu", "cuda"):
        raise LaunchError(f"device={device!r}: ranks run on 'cpu', 'cuda' or 'cuda:N'")
    if kind == "cuda" and (not gpus or (index and not (index.isdigit() and int(index) < gpus))):
        raise LaunchError(f"device={device!r}: this machine has {gpus} visible CUDA devices; pass device='cpu'")
    if backend is not None and not dist.is_backend_available(backend):
        raise LaunchError(f"backend={backend!r} is not available in this build of torch; leave it out, or use 'gloo'")
    if kind == "cpu":
        return [DeviceAssignment("cpu", backend or "gloo")] * len(places)
    devices = [f"cuda:{index or place.world_rank % gpus}" for place in places]
    assignments = []
    for place, chosen in zip(places, devices, strict=True):
        of_side = [d for d, other in zip(devices, places, strict=True) if other.side == place.side]
        shared = len(set(of_side)) < len(of_side)
        notes: tuple[str, ...] = ()
        used = backend or ("nccl" if dist.is_nccl_available() and not shared else "gloo")
        if shared and used == "nccl":
            used = "gloo"
        if shared and used == "gloo" and backend != "gloo":
            notes = (f"several {place.side} ranks share one GPU, which nccl refuses: their group uses gloo",)
        assignments.append(DeviceAssignment(chosen, used, notes))
    return assignments
