"""The namespace in which a rank runs functions, expressions and cells, for as long as the rank lives."""

from __future__ import annotations

import ast
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import graftlab
from graftlab.base import shipping
from graftlab.base.shipping import UnshippedValue
from graftlab.base.sources import install_source, parse
from graftlab.ranks.messages import Call, Dispatch, Evaluate, Execute, Failure, Work
from graftlab.transforms import user_traceback


class Namespace:
    """Runs the work of a run. ``variables`` are the globals of expressions and cells: those of ``module``, or of a new
    ``__main__``.
    """

    def __init__(self, module: types.ModuleType | None = None) -> None:
        if module is None:
            # Cells run in a real __main__, so that dataclasses and pickle find the classes defined there.
            module = types.ModuleType("__main__")
            module.__dict__.update(gl=graftlab, torch=torch)
            sys.modules["__main__"] = module
        self.variables = module.__dict__
        self._handle = Dispatch[[], Any]()
        self._handle.on(Call, self._call)
        self._handle.on(Evaluate, self._evaluate)
        self._handle.on(Execute, self._execute)

    def run(self, work: Work) -> Any:
        """Run the work and return its value. Raises what the user's code raises."""
        return self._handle(work)

    def _call(self, call: Call) -> Any:
        function, args, kwargs = shipping.unpack_call(call.packed)
        return function(*args, **kwargs)

    def _evaluate(self, work: Evaluate) -> Any:
        install_source(work.filename, work.source)
        # Without dont_inherit, this module's __future__ imports would apply to the user's code.
        return eval(compile(work.source.strip(), work.filename, "eval", dont_inherit=True), self.variables)

    def _execute(self, work: Execute) -> Any:
        """Execute a cell. As in a notebook, its value is that of its last line if that is an expression."""
        install_source(work.filename, work.source)
        tree = parse(work.source, work.filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, work.filename, "exec", dont_inherit=True), self.variables)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), work.filename, "eval", dont_inherit=True), self.variables)
        backend = sys.modules.get("graftlab.ranks.matplotlib_backend")
        if backend is not None:
            backend.show_all_but(value if isinstance(value, sys.modules["matplotlib.figure"].Figure) else None)
        return replace_large(value)


def failure_of(error: BaseException) -> Failure:
    """Describe the exception that ended a run's work."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled)  # type: ignore[arg-type]
    except Exception:
        # The text suffices without the object, which only lets the notebook raise the same class.
        pickled = None
    message = _message_of(error)
    if isinstance(error, SystemExit):
        message = f"the code called exit({error.code!r}); the rank keeps running"
    return Failure(type(error).__name__, message, user_traceback(error), pickled)


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"(its message cannot be shown: str() of it raised {type(problem).__name__})"


# ---- a cell's last value --------------------------------------------------------------------------------------------

LARGEST_SHOWN = 32 << 20
"""The most bytes of a cell's last value that are sent to the notebook."""

# Deeper values, and parts beyond this number, are not measured.
_DEPTH = 24
_PARTS = 10_000


def replace_large(value: Any, limit: int = LARGEST_SHOWN) -> Any:
    """Return the value, or if it is large a text that says how to fetch it."""
    size = _size(value, limit, 0, set())
    if size <= limit:
        return value
    kind = type(value).__qualname__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    what = f"{kind} of shape {list(shape)}, {dtype}" if isinstance(shape, tuple) and dtype is not None else kind
    many = f"{size >> 20} MiB" if hasattr(value, "nbytes") else f"more than {limit >> 20} MiB"
    return UnshippedValue(
        kind,
        f"<{what}: {many}, which stay on the rank. The last value of a cell is shown up to {limit >> 20} MiB; "
        "`%graft run -o run EXPR` fetches all of it, or a part that you choose>",
        "it is large, and was not requested",
    )


def _size(value: Any, limit: int, depth: int, seen: set[int]) -> int:
    """Estimate the bytes of a value; beyond the limit the estimate may be too low."""
    if depth > _DEPTH or id(value) in seen or isinstance(value, (type, types.ModuleType)):
        return 0
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return len(value)
    seen.add(id(value))
    # A class that makes attributes up, such as that of ctypes.cdll, may raise any error.
    nbytes = value.nbytes if hasattr(type(value), "nbytes") else None
    if isinstance(nbytes, int):
        return nbytes
    if type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "memory_usage"):
        return int(value.memory_usage().sum())
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = [part for pair in list(value.items())[:_PARTS] for part in pair]
        count = 2 * len(value)
    elif isinstance(value, (list, tuple, set, frozenset)):
        count, parts = len(value), list(value)[:_PARTS] if not isinstance(value, (list, tuple)) else value[:_PARTS]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        count = 0
    # About the size of a number in a container.
    total = 8 * count
    for part in parts:
        if total > limit:
            break
        total += _size(part, limit, depth + 1, seen)
    return total
