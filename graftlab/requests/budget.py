"""Limits on reading one file, so that no small file takes the memory or the time of a large one.

Almost every object of a pickle takes at least a byte of the file. The exceptions: one large object in many places, keys
that are slow to compare or hash, compressed data, and tensors that show one number many times.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# Beyond what a file's own size allows: room for small files, and seconds for slow machines.
_BYTES, _BYTES_A_BYTE = 64 << 20, 16
_SECONDS, _SECONDS_A_BYTE = 10.0, 2e-6
_OBJECTS = 200_000_000
_DEEPEST, _DEEPEST_KEY, _HEAVIEST_KEY = 1000, 100, 100_000
_WORD = 8
_STEP = 256


class BudgetExceeded(ValueError):
    """A budget was exceeded; the message names it."""


class Budget:
    """The budget for reading ``size`` bytes, from now on. Methods raise :class:`BudgetExceeded`."""

    def __init__(self, size: int) -> None:
        self._bytes_left = self._bytes = _BYTES + _BYTES_A_BYTE * size
        self._seconds = _SECONDS + _SECONDS_A_BYTE * size
        self._end = time.monotonic() + self._seconds
        self._objects = 0

    def count(self) -> None:
        """Count an object."""
        self._objects += 1
        if self._objects % _STEP == 0:
            if self._objects > _OBJECTS:
                raise BudgetExceeded(f"more than {_OBJECTS:,} objects, which is the budget of a file")
            self.check_time()

    def check_time(self) -> None:
        if time.monotonic() > self._end:
            raise BudgetExceeded(f"reading it takes more than {self._seconds:.0f} s, the time budget of its size")

    def take(self, size: int) -> None:
        """Count bytes that are about to be allocated."""
        self._bytes_left -= size
        if self._bytes_left < 0:
            raise BudgetExceeded(f"it expands to more than {self._bytes:,} bytes, the memory budget of its size")

    def take_copies(self, values: Iterable[Any]) -> None:
        """Count copies of these values and of the text and bytes directly in them."""
        for value in values:
            if isinstance(value, (str, bytes, bytearray)):
                self.take(len(value))
            elif isinstance(value, (list, tuple, dict, set, frozenset)):
                self.take(_WORD * len(value))
                parts: Iterable[Any] = value.values() if isinstance(value, dict) else value
                self.take(sum(len(part) for part in parts if isinstance(part, (str, bytes, bytearray))))

    def pieces(self, items: list[T]) -> Iterator[list[T]]:
        """Yield a few items at a time and check the time in between: equal hashes slow each insertion down."""
        for start in range(0, len(items), _STEP):
            self.check_time()
            yield items[start : start + _STEP]

    def require_light(self, keys: Iterable[Any]) -> None:
        """Refuse keys that are slow to hash.

        Hashing a tuple hashes each tuple in it again, as often as it occurs.
        """
        for key in keys:
            if type(key) is tuple:
                self._weigh_tuple(key)
            elif type(key) is int and key.bit_length() > _HEAVIEST_KEY:
                raise BudgetExceeded(f"a key that is a number of {key.bit_length()} bits")

    def _weigh_tuple(self, key: tuple[Any, ...]) -> None:
        levels = [{id(key): key}]
        while inner := {id(item): item for each in levels[-1].values() for item in each if type(item) is tuple}:
            self.check_time()
            levels.append(inner)
            if len(levels) > _DEEPEST_KEY:
                raise BudgetExceeded(f"a key of more than {_DEEPEST_KEY} nested tuples")
        weights: dict[int, int] = {}
        for each in itertools.chain.from_iterable(level.values() for level in reversed(levels)):
            weights[id(each)] = 1 + sum(
                weights[id(item)]
                if type(item) is tuple
                else 1 + (item.bit_length() // _WORD if type(item) is int else 0)
                for item in each
            )
            if weights[id(each)] > _HEAVIEST_KEY:
                raise BudgetExceeded(f"a key of tuples with more than {_HEAVIEST_KEY:,} parts")

    def require_shallow(self, root: object) -> None:
        """Refuse deeper nesting than any program writes; a recursive walk through it would overflow the stack."""
        level: list[Collection[Any]] = [root] if isinstance(root, (list, tuple, dict)) else []
        seen: set[int] = set()
        depth = 0
        while level:
            depth += 1
            if depth > _DEEPEST:
                raise BudgetExceeded(f"lists, tuples and dicts nested more than {_DEEPEST} deep")
            self.check_time()
            inner: dict[int, Collection[Any]] = {}
            for each in level:
                parts = each.values() if isinstance(each, dict) else each
                inner.update((id(part), part) for part in parts if type(part) in (list, tuple, dict))
            level = [part for key, part in inner.items() if key not in seen]
            seen.update(inner)
