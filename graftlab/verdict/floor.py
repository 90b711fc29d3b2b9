"""The noise floor: up to which difference rounding alone may be at work."""

from __future__ import annotations

DEFAULT_NOISE_FLOOR = 1e-5
"""``rel_l2`` up to which float32 agrees with float32, unless told otherwise.

A correct target in the quickstart stays below 2e-6 at every tap; with its mistake it comes to 6e-2. About 2e-2 suits
bfloat16 against float32.
"""
