"""The Python functions and methods that filters may use. None of them raises; without a result they return None.

Each is bounded in time and size, whatever the tags contain: the result for a text that is too long, or for too many
items, is None too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import regex

MAX_ITEMS = 1_000
"""The most items of a range, a collection or a split text that a filter iterates over."""

MAX_TEXT = 100_000
"""The most characters of a text that methods and functions accept."""

METHODS = ("startswith", "endswith", "lower", "upper", "strip", "split", "group")
"""The methods that may be called: ``group`` on a match, the others on text."""

_MATCHES = (re.Match, regex.Match)


def _plain(value: Any) -> Any:
    """Return plain text for an instance of a subclass of str, so that no code of a tag's class runs."""
    return str.__str__(value) if isinstance(value, str) else value


def call_method(name: str, text: object, arguments: list[Any]) -> Any:
    """Return ``text.name(*arguments)``; None if ``text`` has no such method, or if Python refuses the arguments."""
    text = _plain(text)
    if name == "group":
        if type(text) not in _MATCHES:
            return None
    elif not isinstance(text, str) or len(text) > MAX_TEXT:
        return None
    try:
        result = getattr(text, name)(*map(_plain, arguments))
    except Exception:  # any object can be a tag, and so an argument
        return None
    return result if not isinstance(result, list) or len(result) <= MAX_ITEMS else None


def items_of(value: object) -> Iterable[Any] | None:
    """Return the items to iterate over: of a collection, a range or a text, if it is not too long."""
    value = _plain(value)
    if type(value) in (tuple, list, set, frozenset, range) or isinstance(value, str):
        try:
            if len(value) <= MAX_ITEMS:  # type: ignore[arg-type]
                return value  # type: ignore[return-value]
        except OverflowError:  # a range too long for len()
            return None
    return None


def item_or_slice(value: object, key: object) -> Any:
    """Return ``value[key]`` of a text, an ordered collection or a match; None if it has no such item."""
    value = _plain(value)
    if type(value) not in (tuple, list, range, *_MATCHES) and not isinstance(value, str):
        return None
    try:
        return value[key]  # type: ignore[index]
    except Exception:  # out of range, or not an index
        return None


def _guarded(function: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        arguments = [_plain(each) for each in given]
        if any(not isinstance(each, kinds) or (isinstance(each, str) and len(each) > MAX_TEXT) for each in arguments):
            return None
        try:
            return function(*arguments)
        except Exception:  # such as int("x"), or any error of a subclass
            return None

    return call


def _of_items(function: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    """Wrap a function so that it takes one collection, or several values."""

    def call(*arguments: Any) -> Any:
        items = items_of(arguments[0]) if len(arguments) == 1 else arguments
        if items is None:
            return None
        try:
            return function(items)
        except Exception:  # items that cannot be compared, or no items
            return None

    return call


def _length(value: Any) -> int | None:
    return len(value) if type(value) in (tuple, list, set, frozenset, range) or isinstance(value, str) else None


_SCALAR = (int, float, str)

# By name: the function, and the minimum and maximum number of arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "len": (_guarded(_length, object), 1, 1),
    "range": (_guarded(range, int), 1, 3),
    "int": (_guarded(int, *_SCALAR), 1, 1),
    "float": (_guarded(float, *_SCALAR), 1, 1),
    "str": (_guarded(str, *_SCALAR, type(None)), 1, 1),
    "abs": (_guarded(abs, int, float), 1, 1),
    "min": (_of_items(min), 1, 100),
    "max": (_of_items(max), 1, 100),
    "any": (_of_items(any), 1, 1),
    "all": (_of_items(all), 1, 1),
}
