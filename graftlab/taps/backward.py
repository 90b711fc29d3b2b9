"""Whether a backward pass is running."""

from __future__ import annotations

from torch.utils.module_tracker import ModuleTracker

# Only queried. It would install hooks when entered, which never happens.
_tracker = ModuleTracker()


def is_backward() -> bool:
    """Whether this thread runs a backward pass of autograd's engine."""
    return bool(_tracker.is_bw)
