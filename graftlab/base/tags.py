"""Tags: what describes one call of a tap, and the address under which its tensor travels."""

from __future__ import annotations

import math
import numbers
import re
from typing import Any, NamedTuple

Plain = str | int | float | bool | None
"""What a tag's value becomes where it leaves the rank: see :func:`plain`."""

TagItems = tuple[tuple[str, Any], ...]
"""Tags as a value that can be hashed: their names and values, in the order in which they were given."""

# Tags that graftlab sets itself; a caller's tag cannot have these names.
RESERVED_TAGS = frozenset({"name", "step", "side", "rank", "recompute_status"})

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: object) -> Plain:
    """A tag's value as it travels in keys and rows, which must not need its class: text, a number, or its repr.

    NaN becomes the text ``"nan"``: no NaN equals another, so two taps that have one would never pair.
    """
    if value is None or type(value) in (str, int, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return "nan" if math.isnan(number) else number
    # Where an object lies in memory would keep taps of two processes apart, and says nothing in a row.
    return _ADDRESS.sub("", repr(value))


class TapKey(NamedTuple):
    """The address of one tensor: equal on both sides exactly when the two taps mean the same value."""

    step: int
    name: str
    tags: tuple[tuple[str, Plain], ...]
    recompute_status: str
    occurrence: int
