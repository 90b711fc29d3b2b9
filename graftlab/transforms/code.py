"""Source text that makes a plan's transform again in another notebook."""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from graftlab.base.sources import literal, parse
from graftlab.errors import TransformError
from graftlab.transforms.spec import TransformSpec

# What the source of a transform can use without an import.
_GIVEN = frozenset({"torch", "gl", "GraftTransformInput", *dir(builtins)})


def source_to_share(spec: TransformSpec) -> str:
    """Return source text with which a plan makes this transform again, whatever else a notebook has defined.

    Of a function, that is its definition, with the modules and the plain values that it reads from its notebook. Raises
    :class:`TransformError` if it reads anything else, or if its source is not known.
    """
    if spec.kind != "function":
        return spec.text
    function = inspect.unwrap(spec.load())
    if not isinstance(function, types.FunctionType):
        raise _cannot(spec, f"it is a {type(function).__name__}, not a function; write a function that calls it")
    try:
        written = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise _cannot(spec, f"its source is not known ({error})") from error
    definition = _definition(written)
    if definition is None:
        raise _cannot(spec, "several functions begin on its line; define it with def")
    read = {name: function.__globals__[name] for name in _read_in(function.__code__) if name in function.__globals__}
    read |= inspect.getclosurevars(function).nonlocals
    lines = [_assigned(spec, name, value) for name, value in read.items()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if function.__closure__ is None and not all(_is_plain(value) for value in defaults):
        raise _cannot(spec, "the default of a parameter is not a plain value; compute it in the function")
    definition = _with_values(definition, function)
    if _names_in(_annotations_of(definition)) - _GIVEN - {*read}:
        lines.insert(0, "from __future__ import annotations")
    return "\n".join([*(line for line in lines if line), definition])


def _read_in(code: types.CodeType) -> Iterator[str]:
    """The global names that a function reads, also in the functions and comprehensions inside it."""
    for each in dis.get_instructions(code):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield each.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _read_in(inner)


def _parsed(definition: str) -> ast.FunctionDef | ast.Lambda:
    return next(node for node in ast.walk(parse(definition)) if isinstance(node, (ast.FunctionDef, ast.Lambda)))


def _annotations_of(definition: str) -> list[ast.expr]:
    made = _parsed(definition)
    given = made.args
    alone = [each for each in (given.vararg, given.kwarg) if each is not None]
    found = [each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *alone)]
    found.append(made.returns if isinstance(made, ast.FunctionDef) else None)
    return [each for each in found if each is not None]


def _names_in(expressions: list[ast.expr]) -> set[str]:
    return {node.id for each in expressions for node in ast.walk(each) if isinstance(node, ast.Name)}


def _with_values(definition: str, function: types.FunctionType) -> str:
    """The definition, with the values of those defaults of its parameters that it reads from its notebook."""
    given = _parsed(definition).args
    values = function.__kwdefaults__ or {}
    defaults = [*zip(given.defaults, function.__defaults__ or (), strict=True)]
    defaults += [
        (default, values[each.arg])
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is not None
    ]
    text = definition.encode()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for default, value in reversed(defaults):
        if _names_in([default]) and _is_plain(value):
            assert default.end_lineno is not None
            assert default.end_col_offset is not None
            first = starts[default.lineno - 1] + default.col_offset
            last = starts[default.end_lineno - 1] + default.end_col_offset
            text = text[:first] + literal(value).encode() + text[last:]
    return text.decode()


def _definition(written: str) -> str | None:
    """The statement that defines a function, without decorators; a lambda is given the name ``transform``."""
    try:
        tree = parse(written)
    except SyntaxError:
        # A lambda in the middle of a call may begin on a line that is no statement.
        return None
    if len(tree.body) == 1 and isinstance(tree.body[0], ast.FunctionDef):
        made = tree.body[0]
        lines = written.splitlines()[made.lineno - 1 : made.end_lineno]
        return "\n".join(lines) + "\n"
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
    return f"transform = {ast.unparse(found[0])}\n" if len(found) == 1 else None


def _assigned(spec: TransformSpec, name: str, value: Any) -> str:
    """A line that gives a name the value that a function reads; empty for what a transform's source has anyway."""
    if name in _GIVEN:
        return ""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}"
    if _is_plain(value):
        return f"{name} = {literal(value)}"
    module, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module not in (None, "__main__") and own is not None and own.isidentifier():
        return f"from {module} import {own} as {name}"
    raise _cannot(spec, f"it reads {name!r}, a {type(value).__name__} of its notebook; define that in the function")


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _cannot(spec: TransformSpec, why: str) -> TransformError:
    return TransformError(f"the transform {spec.label} cannot be written as code: {why}")
