"""Where shipped functions, expressions and cells run: one namespace, for as long as the rank lives."""

from __future__ import annotations

import ast
import pickle
import sys
import types
from typing import Any

import torch

import graftlab
from graftlab.base import shipping
from graftlab.base.sources import install_source, parse
from graftlab.ranks.large_values import unless_large
from graftlab.ranks.messages import Call, Dispatch, Evaluate, Execute, Failure, Work
from graftlab.transforms import user_traceback


class Workplace:
    """Does what a run asks for. ``namespace`` is the one in which expressions and cells run."""

    def __init__(self) -> None:
        # Cells run in a real __main__, so that dataclasses and pickle find what they define.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.namespace.update(gl=graftlab, torch=torch)
        self._handle = Dispatch[[], Any]()
        self._handle.on(Call, self._call)
        self._handle.on(Evaluate, self._evaluate)
        self._handle.on(Execute, self._execute)

    def do(self, work: Work) -> Any:
        """The value of the work; raises what the user's code raises."""
        return self._handle(work)

    def _call(self, call: Call) -> Any:
        function, args, kwargs = shipping.unpack_call(call.packed)
        return function(*args, **kwargs)

    def _evaluate(self, work: Evaluate) -> Any:
        install_source(work.filename, work.source)
        # Without dont_inherit the user's code would be compiled under this module's own __future__ imports.
        return eval(compile(work.source.strip(), work.filename, "eval", dont_inherit=True), self.namespace)

    def _execute(self, work: Execute) -> Any:
        """Execute a cell; like a notebook, its value is that of a last line that is an expression."""
        install_source(work.filename, work.source)
        tree = parse(work.source, work.filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, work.filename, "exec", dont_inherit=True), self.namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), work.filename, "eval", dont_inherit=True), self.namespace)
        backend = sys.modules.get("graftlab.ranks.figures")
        if backend is not None:
            backend.show_all_but(value if isinstance(value, sys.modules["matplotlib.figure"].Figure) else None)
        return unless_large(value)


def failure_of(error: BaseException) -> Failure:
    """What the notebook is told of an exception that ended a work."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        pickle.loads(pickled)  # type: ignore[arg-type]
    except Exception:
        # The text is complete; the object only lets the notebook raise the same class.
        pickled = None
    message = _told_by(error)
    if isinstance(error, SystemExit):
        message = f"the code called exit({error.code!r}); the rank goes on"
    return Failure(type(error).__name__, message, user_traceback(error), pickled)


def _told_by(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"(its message cannot be shown: str() of it raised {type(problem).__name__})"
