"""Names of the torch operations in a model's code: the variable that gets the result, or else the line of source."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import executing
import torch

from graftlab.lines.frames import is_of_graftlab, is_of_model_code, model_frame

# Helpers that return the result of a helper, and so on, before a line assigns it.
_MOST_CALLERS = 8
# Where torch passes a call on to a mode; the operation is still the one that the calling line names.
_PASSED_ON = ("_device.py", "overrides.py", "_tensor.py", "_jit_internal.py", "_ops.py", "functional.py")
CALL_OF_MODULE = torch.nn.Module._call_impl.__code__
# What libraries call it: all_reduce, tensor_model_parallel_all_reduce, reduce_from_tensor_model_parallel_region.
_REDUCTION = re.compile(r"all_?reduce|reduce_?scatter|reduce_from")
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Key = tuple[CodeType, int, str, bool]


class OperationName(NamedTuple):
    """The name of an operation's result inside its module.

    ``is_plain`` is whether it is a variable's. ``items`` names the tensors of a result that a line unpacks.
    ``operation`` is the function, ``line`` such as ``L12`` the line of the call in ``file``. ``is_summand`` is whether
    the source passes it on to be summed over ranks: each rank then has a part of a value that no side shows.
    """

    name: str
    is_plain: bool
    operation: str
    line: str
    file: str
    items: tuple[str, ...] = ()
    is_summand: bool = False


class _Site(NamedTuple):
    """What the source shows of one place in a function: where its value is assigned or returned."""

    function: str
    line: int
    ordinal: str = ""
    variable: str | None = None
    variables: tuple[str, ...] = ()
    is_returned: bool = False
    place: int | None = None
    is_summand: bool = False


class NamesInside:
    """Names the operations of one module. ``forward`` is the module's own, which adds no part to a name."""

    def __init__(self, module: Any) -> None:
        self._forward = _code_of(module.forward)
        self._known: dict[_Key, OperationName] = {}
        self._sites: dict[tuple[CodeType, int], _Site] = {}

    def is_forward(self, code: CodeType) -> bool:
        """Whether this is the code of the module's own forward."""
        return code is self._forward

    def of(self, function: Any, caller: FrameType) -> OperationName | None:
        """Return the name of a call of a torch function, made by this frame.

        None for a call that no code of a model makes: the hooks of graftlab run inside a model too. The same operation
        in the same source has the same name in each process.
        """
        each: FrameType | None = caller
        while each is not None and (_passes_on(each.f_code) or not is_of_model_code(each.f_code.co_filename)):
            # A module of torch's own calls it: the code of the model is outside the module.
            is_own = is_of_graftlab(each.f_code) and not _passes_on(each.f_code)
            if is_own or each.f_code is CALL_OF_MODULE:
                return None
            each = each.f_back
        frame = None if each is None else model_frame(each)
        if frame is None:
            return None
        operation = name_of(function)
        is_direct = _is_direct(caller, frame)
        key = (frame.f_code, frame.f_lasti, operation, is_direct)
        found = self._known.get(key)
        if found is None:
            found = self._named(frame, operation, is_direct)
            if is_direct and self._is_summand(frame):
                found = found._replace(is_summand=True)
            # A helper's result has the name that its caller gives it, which is not always the same.
            if not (is_direct and self._site(frame).is_returned):
                self._known[key] = found
        return found

    def _named(self, frame: FrameType, operation: str, is_direct: bool) -> OperationName:
        own = self._site(frame)
        what = operation, f"L{own.line}", os.path.basename(frame.f_code.co_filename)
        if is_direct:
            site: _Site | None = own
            index, place = None, frame
            for _ in range(_MOST_CALLERS):
                if site is None or not site.is_returned:
                    break
                index = site.place if index is None else index
                caller = place.f_back
                if caller is None or not is_of_model_code(caller.f_code.co_filename):
                    site = None
                    break
                site, place = self._site(caller), caller
            if site is not None and site.variables:
                names = tuple(f"{site.function}{each}" for each in site.variables)
                if index is None:
                    return OperationName(names[0], True, *what, names)
                if index < len(names):
                    return OperationName(names[index], True, *what)
            elif site is not None and site.variable is not None:
                inside = "" if index is None else f"[{index}]"
                return OperationName(f"{site.function}{site.variable}{inside}", True, *what)
        ordinal = own.ordinal if is_direct else ""
        return OperationName(f"{own.function}L{own.line}.{operation}{ordinal}", False, *what)

    def _is_summand(self, frame: FrameType) -> bool:
        """Whether the value of this place is summed over ranks, here or where a helper's result goes."""
        site, place = self._site(frame), frame
        for _ in range(_MOST_CALLERS):
            caller = place.f_back
            if site.is_summand or not site.is_returned or caller is None:
                break
            if not is_of_model_code(caller.f_code.co_filename):
                break
            site, place = self._site(caller), caller
        return site.is_summand

    def _site(self, frame: FrameType) -> _Site:
        key = (frame.f_code, frame.f_lasti)
        found = self._sites.get(key)
        if found is None:
            found = self._sites[key] = self._read(frame)
        return found

    def _read(self, frame: FrameType) -> _Site:
        code, line = frame.f_code, frame.f_lineno
        node = executing.Source.executing(frame).node
        inside = next((each for each in _parents(node) if isinstance(each, _Function)), None)
        if node is None or inside is None:
            return _Site("" if code is self._forward else f"{code.co_name.strip('<>')}.", line)
        own = self._forward
        is_forward = (
            own is not None and code.co_filename == own.co_filename and _first_line(inside) == own.co_firstlineno
        )
        function = "" if is_forward else f"{getattr(inside, 'name', 'lambda')}."
        site = _Site(function, line, _ordinal(node, inside))
        return _assigned(site, node, inside)._replace(is_summand=_is_summed(node, inside))


def name_of(function: Any) -> str:
    """Return a torch function's name as a line of source would write it: ``add`` for ``__radd__``."""
    name = str(getattr(function, "__name__", None) or type(function).__name__)
    if name in ("__get__", "__set__"):
        name = str(getattr(function.__self__, "__name__", name))
    if name.startswith("__"):
        name = name.strip("_")
        name = _REFLECTED.get(name, name)
    return name.partition(".")[0]


_REFLECTED = {
    f"r{name}": name
    for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "div")
}


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)


def _passes_on(code: CodeType) -> bool:
    """Whether code is that of another mode, or of a tensor's class, which receives each call and makes it."""
    return code.co_name == "__torch_function__"


def _is_direct(caller: FrameType, frame: FrameType) -> bool:
    """Whether the frame's line calls this operation itself, and no composite function of torch or a helper."""
    each: FrameType | None = caller
    while each is not frame and each is not None:
        if not (_passes_on(each.f_code) or each.f_code.co_filename.endswith(_PASSED_ON)):
            return False
        each = each.f_back
    return True


# ---- reading the source ---------------------------------------------------------------------------------------------


def _parents(node: Any) -> Iterator[ast.AST]:
    # The links to parents are executing's.
    while (node := getattr(node, "parent", None)) is not None:
        yield node


def _first_line(function: ast.AST) -> int:
    decorators = getattr(function, "decorator_list", None)
    return int(decorators[0].lineno if decorators else function.lineno)  # type: ignore[attr-defined]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Iterate over the nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, _Function):
            yield from _own_nodes(child)


def _assigned(site: _Site, node: Any, inside: ast.AST) -> _Site:
    """Add where the value of a node is assigned or returned, if that is plain."""
    if isinstance(node, ast.AugAssign):
        return site._replace(variable=_variable(node.target, inside))
    value, statement = node, getattr(node, "parent", None)
    while isinstance(statement, ast.IfExp) and value is not statement.test:
        value, statement = statement, getattr(statement, "parent", None)
    index = None
    if isinstance(statement, ast.Tuple) and isinstance(statement.ctx, ast.Load):
        index = statement.elts.index(value)
        statement = getattr(statement, "parent", None)
    if isinstance(statement, ast.Return) or (isinstance(statement, ast.Lambda) and statement.body is value):
        return site._replace(is_returned=True, place=index)
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, (ast.AnnAssign, ast.NamedExpr)) and statement.value is value:
        target = statement.target
    else:
        return site
    if isinstance(target, (ast.Tuple, ast.List)):
        names = [_variable(each, inside) for each in target.elts]
        if None in names:
            return site
        if index is None:
            return site._replace(variables=tuple(name for name in names if name is not None))
        return site._replace(variable=names[index]) if len(names) == len(statement.value.elts) else site  # type: ignore[union-attr]
    return site if index is not None else site._replace(variable=_variable(target, inside))


def _is_summed(node: Any, inside: ast.AST) -> bool:
    """Whether a value is an argument of a reduction over ranks, by itself or as a variable that one line assigns."""
    statement = getattr(node, "parent", None)
    if _is_reduction(statement):
        return True
    target = statement.targets[0] if isinstance(statement, ast.Assign) and statement.value is node else None
    name = _plain(target) if isinstance(target, (ast.Name, ast.Attribute)) else None
    later = (each for each in _own_nodes(inside) if _is_reduction(each) and (_line(each) or 0) > (_line(node) or 0))
    return name is not None and any(_plain(argument) == name for call in later for argument in call.args)  # type: ignore[attr-defined]


def _is_reduction(node: object) -> bool:
    called = getattr(node, "func", None) if isinstance(node, ast.Call) else None
    return _REDUCTION.search(str(getattr(called, "attr", getattr(called, "id", "")))) is not None


def _variable(target: ast.AST, inside: ast.AST) -> str | None:
    """Return a target's name, with its number among the assignments to that name in the function, in source order."""
    name = _plain(target)
    if name is None:
        return None
    same = [each for each in _own_nodes(inside) if _is_target(each) and _plain(each) == name]
    return name + _numbered(same, target)


def _plain(target: ast.AST) -> str | None:
    if isinstance(target, ast.Name):
        return target.id
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
        return target.attr
    return None


def _is_target(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _ordinal(node: Any, inside: ast.AST) -> str:
    """Return the number of an operation among those that look like it on its line; blank for the first."""
    look = _look(node)
    return _numbered([each for each in _own_nodes(inside) if _line(each) == _line(node) and _look(each) == look], node)


def _line(node: ast.AST) -> int | None:
    return getattr(node, "lineno", None)


def _look(node: ast.AST) -> object:
    if isinstance(node, ast.Call):
        called = node.func
        return ast.Call, getattr(called, "attr", getattr(called, "id", None))
    operator = getattr(node, "op", None)
    return type(node), type(operator), getattr(node, "attr", None), type(getattr(node, "ctx", None))


def _numbered(same: list[ast.AST], one: ast.AST) -> str:
    # Where it ends is where it is computed: after its operands.
    same.sort(key=lambda node: (node.end_lineno, node.end_col_offset))  # type: ignore[attr-defined]
    number = next((place for place, node in enumerate(same, 1) if node is one), 1)
    if number == 1:
        return ""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    # Not a bare number, which would stand for a layer's.
    return f".{number}{ending}"
