"""What a tap shows, as a tensor that can travel."""

from __future__ import annotations

from typing import Any

import torch

# Of these it is known without asking that no other tensor is inside; to ask a tensor for what it lacks is slow.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def plain_tensor(shown: Any) -> torch.Tensor | str:
    """The plain tensor behind a tap's value, which shares its memory; or, in words, why there is none."""
    if type(shown) in _PLAIN_TENSORS and shown.layout == torch.strided and not shown.is_meta:
        own: torch.Tensor = shown
        return own
    if not isinstance(shown, torch.Tensor):
        return f"its value is {type(shown).__name__}, not a tensor; the tap is skipped"
    local: Any = shown.to_local() if hasattr(shown, "to_local") else shown
    if hasattr(local, "trigger_wait"):
        # The result of a collective that may still be on its way; the plain tensor shares its memory.
        local = local.wait()
    if not isinstance(local, torch.Tensor) or local.layout != torch.strided or local.device.type == "meta":
        return f"a {shown.layout} tensor on {shown.device} cannot travel; the tap is skipped"
    return local
