"""Repetitions of a call that a script makes in an autocast block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


@contextlib.contextmanager
def no_autocast(devices: Iterable[str]) -> Iterator[None]:
    """Leave the script's autocast block on these types of devices; one that the call enters by itself remains.

    It would round what is in float32 to 16 bits again.
    """
    with contextlib.ExitStack() as left:
        for device in devices:
            # Meta tensors have none.
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
                left.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    """Let autocast neither keep copies of weights nor use kept ones.

    A call that the script makes in an autocast block would use the copies of its repetitions, which may be those of
    other weights, and under FSDP2 belong to weights that have been freed, so that gradients are lost.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
