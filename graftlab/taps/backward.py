"""Whether a backward pass is going on."""

from __future__ import annotations

from torch.utils.module_tracker import ModuleTracker

# Used only to ask. It installs hooks when it is entered, which never happens.
_tracker = ModuleTracker()


def is_backward() -> bool:
    """Whether this thread runs a backward pass of autograd's engine at this moment."""
    return bool(_tracker.is_bw)
