"""Tapping the tensors inside a value: a module's output, or its arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graftlab.taps import calls

TapOne = Callable[[str, torch.Tensor], Any]
"""Taps a tensor under a name; returns the tensor to continue with."""

# Outputs nest a few levels; deeper structures are caches or graphs.
_MAX_DEPTH = 6


def tap_inside(name: str, value: Any, tap_one: TapOne, depth: int = _MAX_DEPTH) -> Any:
    """Tap the tensors inside a value. Returns the same object unless a tensor was grafted."""
    if isinstance(value, torch.Tensor):
        return tap_one(name, value)
    if depth == 0:
        return value
    if isinstance(value, (tuple, list)):
        items = [tap_inside(f"{name}[{index}]", item, tap_one, depth - 1) for index, item in enumerate(value)]
        return _rebuilt(value, items)
    if isinstance(value, Mapping):
        entries = {key: tap_inside(f"{name}.{key}", item, tap_one, depth - 1) for key, item in value.items()}
        changed = {key: new for key, new in entries.items() if _differs(new, value[key])}
        if not changed:
            return value
        # A copy keeps the class, and a ModelOutput's attributes beside its entries.
        replaced = copy.copy(value) if hasattr(value, "__setitem__") else dict(value)
        for key, new in changed.items():
            replaced[key] = new
        return replaced
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init]
        entries = {f.name: tap_inside(f"{name}.{f.name}", getattr(value, f.name), tap_one, depth - 1) for f in fields}
        changed = {key: new for key, new in entries.items() if _differs(new, getattr(value, key))}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def tap_in_tuples(name: str, value: Any, tap_one: TapOne, depth: int = _MAX_DEPTH) -> Any:
    """Like :func:`tap_inside`, for tensors and tuples alone: the callee may write into any other container."""
    if isinstance(value, torch.Tensor):
        return tap_one(name, value)
    if depth == 0 or not isinstance(value, tuple):
        return value
    return _rebuilt(value, [tap_in_tuples(f"{name}[{i}]", item, tap_one, depth - 1) for i, item in enumerate(value)])


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A tuple or list of these items; the same object if they are its own."""
    if not any(_differs(new, old) for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _differs(new: Any, old: Any) -> bool:
    # A tracer cannot tell whether two containers are the same.
    return new is not old if not isinstance(old, (tuple, list, Mapping)) else calls.is_tracing() or new is not old
