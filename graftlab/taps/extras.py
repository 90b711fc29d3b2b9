"""What travels with a tap's tensor: the extras that it was given, and those that are set around it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ExtrasWithLayout:
    """Extras, or a callable that gives them, of a tap that was also given a layout."""

    layout: Any
    extras: Any


_carried: ContextVar[Mapping[str, Any] | None] = ContextVar("graftlab_extras", default=None)


@contextmanager
def carrying(extras: Mapping[str, Any]) -> Iterator[None]:
    """Give these extras to every tap inside; a tap's own win over them. Inner ones win over outer ones."""
    before = _carried.set({**(_carried.get() or {}), **extras})
    try:
        yield
    finally:
        _carried.reset(before)


def carried() -> Mapping[str, Any] | None:
    """The extras that are set around a tap that is reached here."""
    return _carried.get()


def together(around: Mapping[str, Any] | None, own: Any) -> Any:
    """Those set around a tap and its own; its own alone where they are no mapping, to which nothing can be added."""
    if not around:
        return own
    if own is None:
        return dict(around)
    return {**around, **own} if isinstance(own, Mapping) else own


def resolved(extras: Any) -> Any:
    """The extras of a tap that is reached now, and wanted: what a callable returns, with those set around it."""
    if isinstance(extras, ExtrasWithLayout):
        extras = extras.extras
    return together(_carried.get(), extras() if callable(extras) else extras)


def unpicklable_part(extras: Any, name: str = "extras") -> str:
    """The innermost part of extras that cannot be pickled, as one would write it."""
    parts: list[tuple[str, Any]] = []
    if type(extras) is dict:
        parts = [(f"{name}[{key!r}]", value) for key, value in extras.items()]
    elif type(extras) in (list, tuple):
        parts = [(f"{name}[{index}]", value) for index, value in enumerate(extras)]
    for inner, part in parts:
        try:
            pickle.dumps(part)
        except Exception:  # whatever a class of the user's raises, it is this part that is wanted
            return unpicklable_part(part, inner)
    return name
