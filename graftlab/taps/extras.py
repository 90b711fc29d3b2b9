"""Extras, which travel with a tap's tensor: the tap's own, and those set around it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExtrasWithLayout:
    """Extras, or a callable that returns them, of a tap that also has a layout."""

    layout: Any
    extras: Any


_carried: ContextVar[Mapping[str, Any] | None] = ContextVar("graftlab_extras", default=None)


@contextmanager
def carrying(extras: Mapping[str, Any]) -> Iterator[None]:
    """Add these extras to every tap inside. A tap's own extras take precedence, and inner extras over outer ones."""
    before = _carried.set({**(_carried.get() or {}), **extras})
    try:
        yield
    finally:
        _carried.reset(before)


def carried() -> Mapping[str, Any] | None:
    """Return the extras set around the current code."""
    return _carried.get()


def together(around: Mapping[str, Any] | None, own: Any) -> Any:
    """Merge the extras set around a tap with its own; return its own alone if they are not a mapping."""
    if not around:
        return own
    if own is None:
        return dict(around)
    return {**around, **own} if isinstance(own, Mapping) else own


def resolved(extras: Any) -> Any:
    """Evaluate a tap's extras now, calling a callable, and merge them with those set around the tap."""
    if isinstance(extras, ExtrasWithLayout):
        extras = extras.extras
    return together(_carried.get(), extras() if callable(extras) else extras)


def unpicklable_part(extras: Any, name: str = "extras") -> str:
    """Return the innermost part of extras that cannot be pickled, written as an expression."""
    parts: list[tuple[str, Any]] = []
    if type(extras) is dict:
        parts = [(f"{name}[{key!r}]", value) for key, value in extras.items()]
    elif type(extras) in (list, tuple):
        parts = [(f"{name}[{index}]", value) for index, value in enumerate(extras)]
    for inner, part in parts:
        try:
            pickle.dumps(part)
        except Exception:  # any error of a user's class means that this is the part
            return unpicklable_part(part, inner)
    return name
