"""Read a pickle as data: follow its opcodes one by one, and import or call nothing that it names.

Python's own unpickler calls what a file names, and subclasses of it are left with objects that later opcodes may call
or change. Here a name stays a name (:class:`Opaque`) unless :mod:`.rebuilding` knows how to rebuild it.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickletools
from collections.abc import Callable
from typing import Any

from graftlab.requests import rebuilding
from graftlab.requests.budget import Budget
from graftlab.requests.records import Opaque

# fmt: off
_CONSTANTS = frozenset({
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
})
# fmt: on
_IGNORED = frozenset({"PROTO", "FRAME", "READONLY_BUFFER"})


class PickleReadError(Exception):
    """The bytes end too early or are not a valid pickle at ``offset``; ``reader`` holds the objects read so far."""

    def __init__(self, reason: str, offset: int, reader: PickleReader) -> None:
        super().__init__(reason, offset)
        self.reason = reason
        self.offset = offset
        self.reader = reader


class PickleReader:
    """Reads one pickle. A reader is used once."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        # The items since the last mark, and those before each mark that is still open.
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        # The memo's indices of objects that are replaced when their state is read.
        self._unfinished: dict[int, list[int]] = {}
        self.budget = Budget(0)

    def read(self, data: bytes) -> Any:
        """Return the pickled object. Raises :class:`PickleReadError`."""
        operations = self._operations()
        self.budget = Budget(len(data))
        file = io.BytesIO(data)
        good = 0
        try:
            for opcode, argument, _ in pickletools.genops(file):
                name = opcode.name
                self.budget.count()
                if name in _CONSTANTS:
                    self._stack.append(argument)
                elif name == "STOP":
                    return self._stack.pop()
                elif name not in _IGNORED:
                    operations[name](argument)
                good = file.tell()
        except IndexError:
            raise PickleReadError("it pops more than it pushed", good, self) from None
        except KeyError as error:
            raise PickleReadError(f"it refers to {error}, which is not in the memo", good, self) from None
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError) as error:
            raise PickleReadError(str(error), good, self) from None
        raise PickleReadError("it does not end", good, self)

    def list_under(self, key: str) -> list[Any]:
        """Return the items read so far of the list under this key of the outermost dict."""
        levels = [*self._outer, self._stack]
        if levels[0] and isinstance(levels[0][0], dict) and isinstance(found := levels[0][0].get(key), list):
            return list(found)
        # Keys and values wait above the dict's mark, and items above the list's, until they are added together.
        waiting = levels[1] if len(levels) > 1 else []
        for before, value in itertools.pairwise(waiting):
            if isinstance(before, str) and before == key and isinstance(value, list):
                return value + (levels[2] if len(levels) > 2 and value is waiting[-1] else [])
        return []

    # ---- the opcodes -------------------------------------------------------------------------------------------------

    def _operations(self) -> dict[str, Callable[[Any], Any]]:
        push = self._push
        return {
            "NONE": lambda _: push(None),
            "NEWTRUE": lambda _: push(True),
            "NEWFALSE": lambda _: push(False),
            "EMPTY_LIST": lambda _: push([]),
            "EMPTY_TUPLE": lambda _: push(()),
            "EMPTY_DICT": lambda _: push({}),
            "EMPTY_SET": lambda _: push(set()),
            "LIST": lambda _: push(self._pop_mark()),
            "TUPLE": lambda _: push(tuple(self._pop_mark())),
            "TUPLE1": lambda _: self._tuple(1),
            "TUPLE2": lambda _: self._tuple(2),
            "TUPLE3": lambda _: self._tuple(3),
            "DICT": lambda _: self._dict(self._pop_mark()),
            "FROZENSET": lambda _: self._frozenset(self._pop_mark()),
            "APPEND": lambda _: self._extend([self._stack.pop()]),
            "APPENDS": lambda _: self._extend(self._pop_mark()),
            "ADDITEMS": lambda _: self._extend(self._pop_mark()),
            "SETITEM": lambda _: self._update([self._stack.pop(-2), self._stack.pop()]),
            "SETITEMS": lambda _: self._update(self._pop_mark()),
            "MARK": self._mark,
            "POP": lambda _: self._stack.pop() if self._stack else self._pop_mark(),
            "POP_MARK": lambda _: self._pop_mark(),
            "DUP": lambda _: push(self._stack[-1]),
            "PUT": self._remember,
            "BINPUT": self._remember,
            "LONG_BINPUT": self._remember,
            "MEMOIZE": lambda _: self._remember(len(self._memo)),
            "GET": self._recall,
            "BINGET": self._recall,
            "LONG_BINGET": self._recall,
            "GLOBAL": lambda named: push(_named(*named.split(" ", 1))),
            "STACK_GLOBAL": lambda _: push(_named(self._stack.pop(-2), self._stack.pop())),
            "EXT1": lambda code: push(Opaque(f"copyreg extension {code}")),
            "EXT2": lambda code: push(Opaque(f"copyreg extension {code}")),
            "EXT4": lambda code: push(Opaque(f"copyreg extension {code}")),
            "PERSID": lambda key: push(Opaque("persistent id", (key,))),
            "BINPERSID": lambda _: push(Opaque("persistent id", (self._stack.pop(),))),
            "REDUCE": lambda _: push(rebuilding.call(*self._call(self._stack.pop(-2), self._stack.pop()))),
            "NEWOBJ": lambda _: push(rebuilding.new(*self._call(self._stack.pop(-2), self._stack.pop()))),
            "NEWOBJ_EX": lambda _: self._new_with_names(),
            "INST": lambda named: push(
                rebuilding.new(*self._call(_named(*named.split(" ", 1)), tuple(self._pop_mark())))
            ),
            "OBJ": lambda _: self._new_from_mark(),
            "BUILD": lambda _: self._build(self._stack.pop()),
        }

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self, _: Any) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._outer.pop()
        return items

    def _tuple(self, size: int) -> None:
        items = self._stack[-size:]
        if len(items) < size:
            raise IndexError
        self._stack[-size:] = [tuple(items)]

    def _extend(self, items: list[Any]) -> None:
        onto = self._stack[-1]
        if isinstance(onto, Opaque):
            onto.items.extend(items)
        elif isinstance(onto, list):
            onto.extend(items)
        elif isinstance(onto, set):
            self._insert(onto, items)
        else:
            raise TypeError(f"a {type(onto).__name__} takes no items")

    def _update(self, items: list[Any]) -> None:
        pairs = list(zip(items[::2], items[1::2], strict=True))
        onto = self._stack[-1]
        if isinstance(onto, Opaque):
            onto.items.extend(pairs)
        elif isinstance(onto, dict):
            self.budget.require_light(items[::2])
            for some in self.budget.pieces(pairs):
                onto.update(some)
        else:
            raise TypeError(f"a {type(onto).__name__} takes no keys")

    def _dict(self, items: list[Any]) -> None:
        self._push({})
        self._update(items)

    def _frozenset(self, items: list[Any]) -> None:
        self._insert(set(), items)
        self._push(frozenset(items))

    def _insert(self, onto: set[Any], items: list[Any]) -> None:
        self.budget.require_light(items)
        for some in self.budget.pieces(items):
            onto.update(some)

    def _call(self, function: Any, args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the function and its arguments, once they are within the budget."""
        if not isinstance(args, tuple):
            raise TypeError(f"arguments are a tuple, not a {type(args).__name__}")
        self.budget.take_copies(args)
        if any(each is set or each is frozenset for each in (function, *args)):
            for items in args:
                if isinstance(items, (list, tuple)):
                    with contextlib.suppress(TypeError):  # an unhashable item makes no set either
                        self._insert(set(), list(items))
        return function, args

    def _remember(self, index: Any) -> None:
        value = self._stack[-1]
        self._memo[int(index)] = value
        if rebuilding.waits_for_state(value):
            self._unfinished.setdefault(id(value), []).append(int(index))

    def _recall(self, index: Any) -> None:
        self._stack.append(self._memo[int(index)])

    def _new_with_names(self) -> None:
        names, arguments = self._stack.pop(), self._stack.pop()
        function, arguments = self._call(self._stack.pop(), arguments)
        self._push(rebuilding.new(function, (*arguments, names) if names else arguments))

    def _new_from_mark(self) -> None:
        kind, *arguments = self._pop_mark()
        self._push(rebuilding.new(*self._call(kind, tuple(arguments))))

    def _build(self, state: Any) -> None:
        self.budget.take_copies([state])
        old = self._stack[-1]
        new = rebuilding.with_state(old, state)
        self._stack[-1] = new
        for index in self._unfinished.pop(id(old), ()):
            self._memo[index] = new


def _named(module: Any, name: Any) -> Any:
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a global is named by two strings")
    return rebuilding.named(module, name)
