"""Default time limit and memory budgets."""

from __future__ import annotations

TIMEOUT = 60.0
"""Seconds for the launch, for every wait of a tap, and for the collectives of each side's process group."""

BUFFER_BUDGET = 256 << 20
"""Bytes per rank for tensors in transit to the other side."""

KEEP_BUDGET = 256 << 20
"""Bytes per rank for the pairs of tensors that the plan's ``keep`` filter matches."""

LONGEST = 1e6
"""The longest wait that can be requested, in seconds. In milliseconds it still fits into 32 bits."""
