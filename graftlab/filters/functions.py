"""The functions and methods of Python that filters may use. None of them raises: what has no answer gives None.

Each is bounded in time and size, whatever the tags hold: of a text that is too long, or of too many items, there is no
answer either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

MAX_ITEMS = 1_000
"""Items that a filter goes through at most, of a range, a collection or a text that was split."""

MAX_TEXT = 100_000
"""Characters of a text that methods and functions take."""

METHODS = ("startswith", "endswith", "lower", "upper", "strip", "split")
"""What may be called on a text."""


def _plain(value: Any) -> Any:
    """A text without what its class may have made of it, so that no code of a tag's class is run."""
    return str.__str__(value) if isinstance(value, str) else value


def call_method(name: str, text: object, arguments: list[Any]) -> Any:
    """``text.name(*arguments)``; None for what is no text, or for arguments that Python would refuse."""
    text = _plain(text)
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        return None
    try:
        result = getattr(text, name)(*map(_plain, arguments))
    except Exception:  # a tag can be any object, as argument too
        return None
    return result if not isinstance(result, list) or len(result) <= MAX_ITEMS else None


def items_of(value: object) -> Iterable[Any] | None:
    """What can be gone through: a collection, a range or a text that is not too long."""
    value = _plain(value)
    if type(value) in (tuple, list, set, frozenset, range) or isinstance(value, str):
        try:
            if len(value) <= MAX_ITEMS:  # type: ignore[arg-type]
                return value  # type: ignore[return-value]
        except OverflowError:  # a range that has no length
            return None
    return None


def item_or_slice(value: object, key: object) -> Any:
    """``value[key]`` of a text or a collection in order; None where there is no such item."""
    value = _plain(value)
    if type(value) not in (tuple, list, range) and not isinstance(value, str):
        return None
    try:
        return value[key]  # type: ignore[index]
    except Exception:  # out of range, or no index
        return None


def _guarded(function: Callable[..., Any], *kinds: type) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        arguments = [_plain(each) for each in given]
        if any(not isinstance(each, kinds) or (isinstance(each, str) and len(each) > MAX_TEXT) for each in arguments):
            return None
        try:
            return function(*arguments)
        except Exception:  # as int("x"), or of a subclass that raises what it likes
            return None

    return call


def _of_items(function: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    """A function of one collection, or of several values."""

    def call(*arguments: Any) -> Any:
        items = items_of(arguments[0]) if len(arguments) == 1 else arguments
        if items is None:
            return None
        try:
            return function(items)
        except Exception:  # items that do not compare, or none at all
            return None

    return call


def _length(value: Any) -> int | None:
    return len(value) if type(value) in (tuple, list, set, frozenset, range) or isinstance(value, str) else None


_SCALAR = (int, float, str)

# By name: what it does, and how few and how many arguments it takes.
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
