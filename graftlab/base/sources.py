"""Source text that is no file (cells, expressions, transforms), made known to tracebacks."""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Callable
from typing import TypeVar

_TRIES = 100
_EXPRESSION = "<expression>"

Tree = TypeVar("Tree", bound=ast.AST)


def install_source(filename: str, source: str) -> None:
    """Let tracebacks show the lines of this source."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def source_of(filename: str) -> str | None:
    """The source that goes by this name and is no file; None where there is none, or it is a file."""
    entry = linecache.cache.get(filename)
    # Entries with a modification time are files, which any process can read itself.
    if entry is None or len(entry) != 4 or entry[1] is not None:
        return None
    return "".join(entry[2])


def parse(source: str, filename: str = "<unknown>") -> ast.Module:
    """As :func:`ast.parse`, which in Python 3.11 fails now and then where another thread parses at the same time.

    There all threads count the depth of the tree in one place. A garbage collection in the midst of a tree lets
    another thread run, and change the count; then a SystemError tells that it differs. The tree was right.
    (github.com/python/cpython/issues/106905)
    """
    return _whole(lambda: ast.parse(source, filename))


def parse_expression(source: str) -> ast.expr:
    """The tree of an expression, without Python's warnings of how it is written.

    ``'\\d'`` in a pattern that is not a raw string is deprecated in Python, and what everybody writes.
    """
    # Not catch_warnings: what it puts back may be what another thread has set for a while only.
    warnings.filterwarnings("ignore", module=_EXPRESSION)
    return _whole(lambda: ast.parse(source, _EXPRESSION, mode="eval")).body


def _whole(read: Callable[[], Tree]) -> Tree:
    for _ in range(_TRIES):
        try:
            return read()
        except SystemError as error:
            if "recursion depth mismatch" not in str(error):
                raise
    return read()
