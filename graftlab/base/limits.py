"""The time limit and the budgets that hold unless somebody asks for others."""

from __future__ import annotations

TIMEOUT = 60.0
"""Seconds: of the launch, of every wait of a tap, and of the collectives of each side's process group."""

BUFFER_BUDGET = 256 << 20
"""Bytes a rank, for tensors on their way to the other side."""

KEEP_BUDGET = 256 << 20
"""Bytes a rank, for the pairs of tensors that the plan's ``keep`` filter holds."""

LONGEST = 1e6
"""Seconds: what a wait can be told to take. What waits use counts in more than milliseconds of 32 bits."""
