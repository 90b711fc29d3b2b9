"""Free memory, for work that is skipped if there is too little of it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_GROUPS = Path("/sys/fs/cgroup")
# A container's limit, what it uses, and its statistics: in version 2 of cgroups, and in version 1.
_FILES = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_MEMORY = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """The memory that a process can still take on this device, in bytes; None if that is unknown."""
    if device.type == "cuda":
        # torch keeps freed memory, and uses it again.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return None
    found = [_number("MemAvailable", _MEMORY, unit=1024), *(_left_in_group(*files) for files in _FILES)]
    return min((each for each in found if each is not None), default=None)


def _left_in_group(most: str, usage: str, statistics: str) -> int | None:
    try:
        limit, used = (int((_GROUPS / name).read_text()) for name in (most, usage))
    except (OSError, ValueError):
        # There is no group, or its limit is the word "max".
        return None
    # Pages of files that the kernel drops when processes need memory.
    dropped = _number("(?:total_)?inactive_file", _GROUPS / statistics) or 0
    return max(0, limit - used + dropped)


def _number(name: str, path: Path, unit: int = 1) -> int | None:
    try:
        found = re.search(rf"^{name}:?\s+(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * unit if found else None
