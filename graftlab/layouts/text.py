"""Layouts as text.

Steps are separated by ``|``: ``"b s (h d) -> b h s d | shard(dim=1, mesh='tp')"``. A step is
a rearrangement or a call with plain values. A text without ``->`` and calls names the dimensions and their splits, in
the notation of :mod:`graftlab.layouts.dims`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from graftlab.base.sources import parse_expression
from graftlab.errors import LayoutError
from graftlab.layouts.dims import parse_dims
from graftlab.layouts.gathering import Gather, Rows
from graftlab.layouts.layout import Layout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.rearrange import Rearrange
from graftlab.layouts.regroup import Regroup
from graftlab.layouts.shards import OneOf, Partial, Replicate, Shard
from graftlab.layouts.sketching import SignedSums
from graftlab.layouts.steps import Pack, Pad, Part, Scale, Step, Strided, Unpack, Window

SAME = "same"

_STEPS: dict[str, Callable[..., Step]] = {
    "rearrange": lambda pattern, **sizes: Rearrange(pattern, tuple(sizes.items())),
    "part": Part,
    "window": Window,
    "strided": Strided,
    "gather": Gather,
    "rows": Rows,
    "pad": Pad,
    "scale": Scale,
    "pack": Pack,
    "unpack": Unpack,
    "sketch": SignedSums,
    "shard": Shard,
    "replicate": Replicate,
    "partial": Partial,
    "one_of": OneOf,
    "regroup": Regroup,
}
# The last dimension of `t (a*c)`, which is not a call of t.
_FUSED_AT_END = re.compile(r"\(\s*[A-Za-z_]\w*(?:\s*\*\s*[A-Za-z_]\w*)+\s*\)\s*$")
_CALL = re.compile(r"\s*([A-Za-z_]\w*)\s*\(.*\)\s*$", re.DOTALL)


def parse_layout(text: str, mesh: Mesh | Mapping[str, int] | int | None = None) -> Layout:
    """Parse a layout; ``"same"`` and blank text are the identity. ``mesh`` is as in :meth:`Layout.on`.

    >>> parse_layout("b s (h d) -> b h s d, h=12 | shard(dim=1, mesh='tp')", mesh=2)
    >>> parse_layout("b s[cp:zigzag] h[tp] d", mesh={"cp": 2, "tp": 2})

    Raises :class:`LayoutError` with the position of the fault.
    """
    if not isinstance(text, str):
        raise LayoutError(f"a layout is written as text, not {type(text).__name__}")
    layout = Layout()
    if text.strip() not in ("", SAME):
        if names_dimensions(text):
            layout = replace(parse_dims(text).layout(), names=text)
        else:
            layout = Layout(tuple(_step(text, piece, offset) for offset, piece in _split(text)))
    return layout if mesh is None else layout.on(mesh)


def names_dimensions(text: str) -> bool:
    """Whether the text is an annotation of dimensions, ``"b s h[tp] d"``, and not steps."""
    called = _CALL.match(text)
    is_call = called is not None and not _FUSED_AT_END.search(text)
    is_one = len(_split(text)) == 1 and "->" not in text and not is_call
    return is_one and text.strip() not in ("", SAME)


def _split(text: str) -> list[tuple[int, str]]:
    """Return the steps with their positions; a ``|`` inside quotes is not a separator."""
    pieces, start, quote = [], 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "|":
            pieces.append((start, text[start:place]))
            start = place + 1
    return [*pieces, (start, text[start:])]


def _step(text: str, piece: str, offset: int) -> Step:
    offset += len(piece) - len(piece.lstrip())
    piece = piece.strip()
    if not piece:
        raise LayoutError("a step is missing here", text, offset)
    if _CALL.match(piece) and not _is_pattern(piece):
        return _call(text, piece, offset)
    if "->" not in piece:
        raise LayoutError(f"{piece!r} is neither a rearrangement (with ->) nor a call", text, offset)
    return _pattern(text, piece, offset)


def _is_pattern(piece: str) -> bool:
    # In `a (b c) -> (a b) c`, unlike in `rearrange('a -> a')`, the arrow is outside quotes.
    return "->" in re.sub(r"'[^']*'|\"[^\"]*\"", "", piece)


def _pattern(text: str, piece: str, offset: int) -> Step:
    """``left -> right, name=size, ...``"""
    pattern, *sizes = piece.split(",")
    given: dict[str, int] = {}
    place = offset + len(pattern) + 1
    for size in sizes:
        name, equals, number = size.partition("=")
        if not equals or not name.strip().isidentifier() or not number.strip().isdigit():
            raise LayoutError("write a size after the comma, as in h=12", text, place)
        given[name.strip()] = int(number)
        place += len(size) + 1
    return _made(lambda: Rearrange(pattern, tuple(given.items())), text, offset, pattern)


def _call(text: str, piece: str, offset: int) -> Step:
    try:
        node = parse_expression(piece)
    except SyntaxError as error:
        raise LayoutError(f"{error.msg}", text, offset + max(0, (error.offset or 1) - 1)) from error
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise LayoutError("a step is a single call, such as shard(dim=0, mesh='tp')", text, offset)
    name = node.func.id
    if name not in _STEPS:
        raise LayoutError(f"there is no step {name!r}; the steps are {', '.join(_STEPS)}", text, offset)
    args = [_value(text, arg, offset) for arg in node.args]
    kwargs: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in kwargs:
            raise LayoutError("give arguments by name, each only once", text, offset + keyword.col_offset)
        kwargs[keyword.arg] = _value(text, keyword.value, offset)
    quoted = args[0] if name == "rearrange" and args and isinstance(args[0], str) else None
    at = offset + (piece.find(quoted) if quoted else 0)
    return _made(lambda: _STEPS[name](*args, **kwargs), text, at, quoted)


def _value(text: str, node: ast.expr, offset: int) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        raise LayoutError(
            "only plain values here: numbers, quoted names, lists", text, offset + node.col_offset
        ) from error
    return tuple(value) if isinstance(value, list) else value


def _made(make: Callable[[], Step], text: str, offset: int, pattern: str | None) -> Step:
    """Make a step; its errors are raised with the position in the whole text."""
    try:
        return make()
    except LayoutError as error:
        place = offset
        if error.text and pattern is not None:
            place += _unsqueezed(pattern, error.position)
        raise LayoutError(error.message, text, place) from error
    except TypeError as error:
        raise LayoutError(re.sub(r"^.*?\(\) ", "", str(error)), text, offset) from error


def _unsqueezed(pattern: str, position: int) -> int:
    """Convert a position in the pattern with single spaces to the position in the original pattern."""
    squeezed = 0
    leading = len(pattern) - len(pattern.lstrip())
    for place in range(leading, len(pattern)):
        if squeezed == position:
            return place
        if not (pattern[place].isspace() and place + 1 < len(pattern) and pattern[place + 1].isspace()):
            squeezed += 1
    return len(pattern.rstrip())
