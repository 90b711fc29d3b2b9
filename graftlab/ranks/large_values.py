"""The last value of a cell, which nobody may have asked for: a large one stays on its rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from graftlab.base.shipping import Unshipped

LIMIT = 32 << 20
"""Bytes up to which the last value of a cell is sent to the notebook."""

# What is nested more deeply, or is one of more parts, is not looked at.
_DEPTH = 24
_PARTS = 10_000


def unless_large(value: Any, limit: int = LIMIT) -> Any:
    """The value, or in the place of a large one what says how to get at it."""
    size = _size(value, limit, 0, set())
    if size <= limit:
        return value
    kind = type(value).__qualname__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    what = f"{kind} of shape {list(shape)}, {dtype}" if isinstance(shape, tuple) and dtype is not None else kind
    many = f"{size >> 20} MiB" if hasattr(value, "nbytes") else f"more than {limit >> 20} MiB"
    return Unshipped(
        kind,
        f"<{what}: {many}, which stay on the rank. The last value of a cell is shown up to {limit >> 20} MiB; "
        "`%graft run -o run EXPR` brings all of it, or what you need of it>",
        "it is large, and was not asked for",
    )


def _size(value: Any, limit: int, depth: int, seen: set[int]) -> int:
    """About how many bytes a value takes; where it is more than the limit, perhaps not all of them."""
    if depth > _DEPTH or id(value) in seen or isinstance(value, type):
        return 0
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return len(value)
    seen.add(id(value))
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "memory_usage"):
        usage = value.memory_usage()
        return int(usage if isinstance(usage, int) else usage.sum())
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = [part for pair in list(value.items())[:_PARTS] for part in pair]
        count = 2 * len(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        count, parts = len(value), list(value)[:_PARTS] if not isinstance(value, (list, tuple)) else value[:_PARTS]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        count = 0
    # A number in a container takes about so much.
    total = 8 * count
    for part in parts:
        if total > limit:
            break
        total += _size(part, limit, depth + 1, seen)
    return total
