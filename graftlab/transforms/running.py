"""Run a transform so that the target stays unchanged whatever it does, and check that its result fits."""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import traceback
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch

from graftlab.base.tensor_bytes import as_bytes
from graftlab.diffs.measure import DiffStats, measure
from graftlab.errors import TransformError
from graftlab.transforms.align import align_by_request
from graftlab.transforms.inputs import GraftTransformInput, Outcome, Transform, dtype_name
from graftlab.transforms.quantised import by_values


def run_transform(transform: Transform | None, graft_input: GraftTransformInput) -> Outcome:
    """Run the user's transform, or the default for None, and check the result.

    The user's transform runs on private copies, including extras, so it cannot change the model; it may write into
    them, and if it returns None, its result is in ``target``. Raises the transform's own errors, and
    :class:`TransformError`, with the transform's own line in its traceback, if the result is not a tensor of the
    target's shape. A different dtype or device is converted and noted in ``cast``.

    >>> given = gl.GraftTransformInput({"name": "q"}, [torch.ones(2)], [None], target=torch.zeros(2))
    >>> gl.transforms.run_transform(lambda graft_input: graft_input.received_list[0].double(), given).cast
    'float64 -> float32'
    """
    with torch.no_grad():
        if transform is None:
            return _fitted(by_values(graft_input), graft_input.target)
        if transform is align_by_request:
            return _fitted(align_by_request(graft_input), graft_input.target)
        target = graft_input.target
        with torch.inference_mode(False):  # so that torch counts what is written into the copy
            own = private_tensor(target)
        version, unwritten = _version(target), own._version
        value = transform(
            replace(
                graft_input,
                tags=dict(graft_input.tags),
                received_list=[private_tensor(tensor) for tensor in graft_input.received_list],
                received_extras_list=[private_extras(extras) for extras in graft_input.received_extras_list],
                target=own,
                senders=list(graft_input.senders),
                target_extras=private_extras(graft_input.target_extras),
            )
        )
        try:
            return _outcome(value, own, unwritten, target, version)
        except TransformError as error:
            raise_at(transform, error)


def _outcome(value: object, own: torch.Tensor, unwritten: int, target: torch.Tensor, version: int | None) -> Outcome:
    if _version(target) != version:
        raise TransformError(
            "the transform wrote into the model's own tensor, which it must have obtained elsewhere; write into "
            "graft_input.target, which is a copy"
        )
    # Bytes that numpy writes are not counted, and writing the same numbers changes no byte.
    is_own = _is_own(value, own)
    is_unchanged = (is_own or value is None) and own._version == unwritten and _same_bytes(own, target)
    if is_own and is_unchanged:
        # The receiver's tensor agrees with itself, whatever the other side computed.
        raise TransformError(
            "the transform returned graft_input.target as it was, so there is nothing to compare; make the result from "
            "graft_input.received_list, or leave this tap out with a filter: transform=(filter, function)"
        )
    if value is None and not is_unchanged:
        value = own
    outcome = value if isinstance(value, Outcome) else Outcome(value)  # type: ignore[arg-type]
    if not isinstance(outcome.value, torch.Tensor):
        raise TransformError(
            f"the transform returned {type(outcome.value).__name__}; it must return a tensor of shape "
            f"{list(target.shape)}"
        )
    return _fitted(replace(outcome, value=outcome.value.detach()), target)


def _is_own(value: object, own: torch.Tensor) -> bool:
    """Whether a transform's result is this tensor, a view of all of it as it is, or an outcome with either."""
    if isinstance(value, Outcome):
        is_part = value.rows is not None or value.known is not None or value.measured is not None
        return not is_part and _is_own(value.value, own)
    if value is own or not isinstance(value, torch.Tensor):
        return value is own
    are_strided = value.layout == own.layout == torch.strided and value.device.type != "meta"
    return are_strided and value.dtype == own.dtype and value.is_set_to(own)


def compare(outcome: Outcome, graft_input: GraftTransformInput) -> DiffStats:
    """Measure the target against the transform's result, in the rows that were received.

    >>> given = gl.GraftTransformInput({"name": "q"}, [torch.ones(2)], [None], target=torch.zeros(2))
    >>> gl.transforms.compare(gl.transforms.run_transform(None, given), given).rel_l2
    1.0
    """
    mine, theirs = graft_input.target, outcome.value
    if outcome.measured is not None:
        theirs, mine = outcome.measured
    rows = outcome.rows
    if outcome.known is not None:
        rows = outcome.known.nonzero(as_tuple=True)
    if rows is not None:
        mine, theirs = mine[rows], theirs[rows]
    stats = measure(theirs, mine) if graft_input.direction == "b2t" else measure(mine, theirs)
    if rows is not None and stats.max_abs_index is not None:
        row, *rest = stats.max_abs_index
        stats = replace(stats, max_abs_index=(*(int(index[row]) for index in rows), *rest))
    return stats


def _version(tensor: torch.Tensor) -> int | None:
    """Return a number that changes with each write; None if torch does not count writes."""
    return None if tensor.is_inference() else tensor._version


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors are equal bit by bit, so that NaNs count as equal."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(as_bytes(one), as_bytes(other))


def _fitted(outcome: Outcome, target: torch.Tensor) -> Outcome:
    value = outcome.value
    if value.dtype == target.dtype and value.shape == target.shape and value.device == target.device:
        return outcome
    if value.shape != target.shape:
        raise TransformError(
            f"the transform returned shape {list(value.shape)}; the target has shape {list(target.shape)} "
            f"and nothing is broadcast"
        )
    casts = []
    if value.dtype != target.dtype:
        if value.is_complex() and not target.is_complex():
            raise TransformError(
                f"the transform returned {dtype_name(value.dtype)}, but the target is {dtype_name(target.dtype)}: the "
                f"imaginary part would be lost; return .real or .abs()"
            )
        casts.append(f"{dtype_name(value.dtype)} -> {dtype_name(target.dtype)}")
    if value.device != target.device:
        # The exchange may deliver in host memory; only a device that the user chose is worth a note.
        if value.device.type != "cpu":
            casts.append(f"{value.device} -> {target.device}")
        value = value.to(target.device)
    return replace(outcome, value=value, cast=", ".join(casts) or None)


def user_traceback(error: BaseException) -> str:
    """Format a traceback without graftlab's frames, so that it starts at the user's own line.

    >>> try:
    ...     torch.ones(2) @ torch.ones(3)
    ... except RuntimeError as error:
    ...     "RuntimeError" in gl.transforms.user_traceback(error)
    True
    """
    own = __name__.partition(".")[0]
    frames = _skip(error.__traceback__, own)
    # There may be a decorator between graftlab and the user's function, such as torch.no_grad().
    frames = _skip(frames, own, "torch") or frames
    return "".join(traceback.format_exception(type(error), error, frames, chain=frames is not None)).rstrip()


def _skip(frames: types.TracebackType | None, *packages: str) -> types.TracebackType | None:
    while frames is not None and str(frames.tb_frame.f_globals.get("__name__")).partition(".")[0] in packages:
        frames = frames.tb_next
    return frames


# ---- copies of the inputs -------------------------------------------------------------------------------------------


class UncopyableExtra:
    """Placeholder for a part of the extras that cannot be copied, which a transform must not change."""

    def __init__(self, kind: str, reason: str) -> None:
        self._kind, self._reason = kind, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TransformError(
            f"this part of the tap's extras is a {self._kind} that cannot be copied ({self._reason}), so the transform "
            "does not receive it; put the values that it needs into the extras"
        )

    def __repr__(self) -> str:
        return f"<a {self._kind} that cannot be copied: {self._reason}>"


def private_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, with lazy conjugations and negations resolved."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def private_extras(extras: Any) -> Any:
    """Copy extras: tensors with :func:`private_tensor`, the rest with ``copy.deepcopy``."""
    if extras is None or type(extras) in (bool, int, float, str, bytes):
        return extras
    if type(extras) is dict:
        return {key: private_extras(value) for key, value in extras.items()}
    if type(extras) in (list, tuple):
        return type(extras)(map(private_extras, extras))
    if isinstance(extras, torch.Tensor) and extras.layout == torch.strided and not extras.is_meta:
        local = extras.to_local() if hasattr(extras, "to_local") else extras
        return private_tensor(local)
    try:
        return copy.deepcopy(extras)
    except Exception as error:  # any error of a user's class
        return UncopyableExtra(type(extras).__qualname__, f"{type(error).__name__}: {error}")


# ---- errors at the line of the transform ----------------------------------------------------------------------------


def raise_at(function: Callable[..., Any], error: Exception) -> NoReturn:
    """Raise an error whose traceback points into the function: at its only return statement, or else at its start."""
    source = _code_of(function)
    if source is None:
        raise error
    code = compile("raise error.with_traceback(None)", source.co_filename, "exec").replace(
        co_name=source.co_name, co_firstlineno=_line_at_fault(source)
    )
    # By its module name, user_traceback keeps this frame and leaves out graftlab's.
    exec(code, {"__name__": str(getattr(function, "__module__", None)), "error": error})
    raise AssertionError("raised above")


def _code_of(function: Callable[..., Any]) -> types.CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if isinstance(function, types.MethodType):
        function = function.__func__
    # A callable object's code is its class's __call__.
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
