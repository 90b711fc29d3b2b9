"""Tags: what describes one call of a tap, and the address under which its tensor travels."""

from __future__ import annotations

import numbers
import re
from typing import Any, NamedTuple

TagItems = tuple[tuple[str, Any], ...]
"""Tags as a value that can be hashed: their names and values, in the order in which they were given."""

# Tags that graftlab sets itself; a caller's tag cannot have these names.
RESERVED_TAGS = frozenset({"name", "step", "side", "rank", "recompute_status"})

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def plain(value: object) -> str | int | float | bool | None:
    """A tag's value as it travels in keys and rows, which must not need its class: text, a number, or its repr."""
    if value is None or type(value) in (str, int, float, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    # Where an object lies in memory would keep taps of two processes apart, and says nothing in a row.
    return _ADDRESS.sub("", repr(value))


def is_no_tag(name: str, value: object) -> bool:
    """Whether this can tell no taps apart: a tensor, a list or a dict, of which each side has its own.

    Nor can ``grafter_extras``, by which other graft kits call what travels with a tensor.
    """
    if name == "grafter_extras" or isinstance(value, (list, dict)):
        return True
    if isinstance(value, tuple):
        return any(is_no_tag("", item) for item in value)
    # Tensors of torch, and arrays of others, but not the latter's scalars.
    return hasattr(value, "untyped_storage") or (hasattr(value, "__array__") and type(value).__hash__ is None)


class TapKey(NamedTuple):
    """The address of one tensor: equal on both sides exactly when the two taps mean the same value."""

    step: int
    name: str
    tags: tuple[tuple[str, object], ...]
    recompute_status: str
    occurrence: int
