"""Source text: parsed, written, and registered where it is not in a file, so that tracebacks show it."""

from __future__ import annotations

import ast
import linecache
import math
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

_TRIES = 100
_EXPRESSION = "<expression>"

Tree = TypeVar("Tree", bound=ast.AST)


def install_source(filename: str, source: str) -> None:
    """Make tracebacks show the lines of this source."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def source_of(filename: str) -> str | None:
    """Return the source registered under this name; None if none is, or if it is a file."""
    entry = linecache.cache.get(filename)
    # Entries with a modification time are files, which any process can read itself.
    if entry is None or len(entry) != 4 or entry[1] is not None:
        return None
    return "".join(entry[2])


def parse(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parse as :func:`ast.parse` does, and retry when Python 3.11 fails because another thread parses too.

    In that version all threads share one counter of the tree's depth. If a garbage collection lets another thread run
    in the middle of a tree, the counter is off and Python raises a SystemError, although the tree was correct.
    (github.com/python/cpython/issues/106905)
    """
    return _whole(lambda: ast.parse(source, filename))


def parse_expression(source: str) -> ast.expr:
    """Parse an expression, without Python's syntax warnings.

    ``'\\d'`` in a pattern that is not a raw string is deprecated in Python, but common.
    """
    # Not catch_warnings: it might restore a state that another thread had set only temporarily.
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


def literal(value: Any) -> str:
    """Return a value of a plan as an expression; a text of several lines is written as lines.

    ``value`` is a text, a number, a boolean, None, or a tuple of them.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, tuple):
        inner = ", ".join(map(literal, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if not isinstance(value, str) or "\n" not in value:
        return repr(value)
    body = value.replace("\\", "\\\\")
    if '"""' in value or value.endswith('"'):
        body = body.replace('"', '\\"')
    written = f'"""\\\n{body}"""'
    try:
        # A carriage return, for example, would be read as another character.
        return written if ast.literal_eval(written) == value else repr(value)
    except (SyntaxError, ValueError):
        return repr(value)
