"""Work requests to ranks, made from a user's function, expression or cell."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Literal

from graftlab.base import shipping
from graftlab.base.sources import install_source
from graftlab.base.world import Side
from graftlab.errors import SessionError, warn
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import Call, Evaluate, Execute
from graftlab.ranks.remote_functions import Callee
from graftlab.recordings.recorded_side import RecordedSide


def arguments(call: str, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Check the ``args`` and ``kwargs`` of a session's method ``call``, and return them as a tuple and a dict.

    Raises :class:`SessionError` for a single argument that is not in a tuple. A tensor, for example, would otherwise be
    split along its first dimension.
    """
    if not isinstance(args, (tuple, list)):
        raise SessionError(
            f"{call}: args= must be a tuple of all positional arguments, not {type(args).__name__}; for "
            "a single one write args=(x,)"
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise SessionError(f"{call}: kwargs= must be a dict of all arguments by name, not {kwargs!r:.80}")
    return tuple(args), dict(kwargs)


class WorkFactory:
    """Makes work requests, and gives each source a unique file name for tracebacks.

    Source that is not Python, and values that cannot be sent, are refused here, before any rank begins.
    """

    def __init__(self) -> None:
        self._cells = itertools.count(1)

    def of(self, side: str, callee: Callee, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | Evaluate:
        """The work of calling a function or evaluating an expression.

        Raises :class:`SessionError` for anything else, and :class:`ShippingError` for what cannot be sent.
        """
        if isinstance(callee, str):
            _refuse_arguments(side, callee, args, kwargs)
            return Evaluate(callee, self._named(callee, "eval", "the expression"))
        if not callable(callee):
            raise SessionError(f"{side}= must be a function or an expression, not {type(callee).__name__}")
        return Call(shipping.pack_call(callee, args, kwargs, what=f"the {side} function"))

    def of_sides(
        self, callees: Mapping[Side, Callee | None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[Side, Call | Evaluate]:
        """The work of each side that has a callee. Raises as :meth:`of` does."""
        made: dict[Side, Call | Evaluate] = {}
        shared: dict[str, Call | Evaluate] = {}
        for side, callee in callees.items():
            if callee is None:
                continue
            # One request for both sides, so that a mistake in their expression is reported once.
            work = shared.get(callee) if isinstance(callee, str) else None
            made[side] = work or self.of(side, callee, args, kwargs)
            if isinstance(callee, str):
                shared[callee] = made[side]
        return made

    def of_cell(self, source: str) -> Execute:
        """The work of executing a cell. Raises :class:`SessionError` for what is not the text of Python code."""
        if not isinstance(source, str):
            raise SessionError(f"a cell is a text, not {type(source).__name__}; session.run takes functions")
        filename = self._named(source, "exec", "the cell")
        # Registered here too, because a verdict shows lines of source.
        install_source(filename, source)
        return Execute(source, filename)

    def _named(self, source: str, mode: Literal["eval", "exec"], what: str) -> str:
        filename = f"<graft cell {next(self._cells)}>"
        _refuse_no_python(source, filename, mode, what)
        return filename


def pack_callees(callees: Mapping[str, Callee], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Callee]:
    """Bind callees to their arguments, and pickle them once for any number of runs.

    ``callees`` are by the names of their parameters. On a rank they share what they share here, such as a global that
    they read. Expressions and recordings are returned as they are. Raises :class:`SessionError` for an expression with
    arguments, and :class:`ShippingError` for what cannot be sent.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for name, callee in callees.items():
        _refuse_arguments(name, callee, args, kwargs)
        if not isinstance(callee, (str, RecordedSide)):
            functions[name] = callee
    packed = shipping.pack_together({f"the {name} function": each for name, each in functions.items()}, args, kwargs)
    by_name: dict[str, Callee] = {**callees, **dict(zip(functions, packed, strict=True))}
    return list(by_name.values())


def _refuse_arguments(name: str, callee: Callee, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(callee, str) and (args or kwargs):
        raise SessionError(f"{name}={callee!r} is an expression, which takes no args; write them into it")


def refuse_invalid_expressions(*callees: Callee | None) -> None:
    """Raise :class:`SessionError` for a text that is not a Python expression."""
    for callee in callees:
        if isinstance(callee, str):
            _refuse_no_python(callee, "<graft cell>", "eval", "the expression")


def _refuse_no_python(source: str, filename: str, mode: Literal["eval", "exec"], what: str) -> None:
    try:
        compile(source.strip() if mode == "eval" else source, filename, mode, dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        shown = "".join(traceback.format_exception_only(error)).rstrip()
        raise SessionError(f"{what} is not valid Python, so nothing was run\n{shown}") from error


def warn_of_grafts_into_recordings(callees: Mapping[Side, Callee | None], plan: GraftPlan) -> list[str]:
    """Warn of grafts into a side that is a recording, where they have no effect; returns the warnings."""
    warnings = []
    sides: tuple[tuple[Side, str, str | None], ...] = (("baseline", "t2b", plan.t2b), ("target", "b2t", plan.b2t))
    for side, direction, filter_ in sides:
        if isinstance(callees.get(side), RecordedSide) and (filter_ or "").strip():
            warnings.append(
                f"{direction} grafts into the {side}, which is a recording: it computes nothing from a graft, "
                f"so no later tap shows the graft's effect"
            )
            warn(warnings[-1])
    return warnings


def code_of(callee: Callee) -> str | CodeType:
    """The text of a callee, or the code object of a function, which does not hold the function's data."""
    if isinstance(callee, str):
        return callee
    code = getattr(inspect.unwrap(callee), "__code__", None)
    return code if isinstance(code, CodeType) else f"# {type(callee).__qualname__}"


def source_of(code: str | CodeType) -> str:
    """The source of the code that :func:`code_of` returned, if known."""
    if isinstance(code, str):
        return code
    try:
        return inspect.getsource(code)
    except OSError:
        return f"# {code.co_name}: its source is not known"
