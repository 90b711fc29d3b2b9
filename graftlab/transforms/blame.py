"""Errors about what a transform did, raised where its author looks: in the transform."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NoReturn


def raise_at(function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raise an error from inside of the function, as its traceback tells: at its only return, or else at its start."""
    source = _code_of(function)
    if source is None:
        raise error
    code = compile("raise error.with_traceback(None)", source.co_filename, "exec").replace(
        co_name=source.co_name, co_firstlineno=_line_at_fault(source)
    )
    # Frames of graftlab are left out of the traceback that users see, by this name.
    exec(code, {"__name__": str(getattr(function, "__module__", None)), "error": error})
    raise AssertionError("raised above")


def _code_of(function: Callable[..., Any]) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        function = function.__func__
    # Of an object that can be called, its class says how.
    called = function if isinstance(function, types.FunctionType) else vars(type(function)).get("__call__")
    code = getattr(called, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _line_at_fault(code: types.CodeType) -> int:
    starts = dict(dis.findlinestarts(code))
    lines, line = set(), code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = starts.get(instruction.offset) or line
        if instruction.opname.startswith("RETURN_") and instruction.opname != "RETURN_GENERATOR":
            lines.add(line)
    return lines.pop() if len(lines) == 1 else code.co_firstlineno
