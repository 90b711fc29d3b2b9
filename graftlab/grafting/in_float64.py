"""Runs code in float64, operator by operator, so that results are not rounded between operators.

Compiled code that fuses operators rounds less often than eager code, so the two differ even if both are correct. The
distance of eager code from its own result in float64 shows how much of a difference that can explain.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graftlab.taps.backward import is_backward
from graftlab.taps.untraced import UntracedMode

_WIDE = {
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
_FLOATING = {*_WIDE, *_WIDE.values()}

_COARSE = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_here = threading.local()


@dataclass(frozen=True)
class CoarseDtypes:
    """The dtypes of 16 bits of a run in float64, by name: of its operators' inputs, and of results that stayed so."""

    read: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)


@contextlib.contextmanager
def in_float64(*, rounds_stored: bool = False, widens_new: bool = False) -> Iterator[CoarseDtypes]:
    """Have this thread's operators compute in float64, whatever lower precision their inputs have.

    Their results stay in float64, so nothing is rounded between them. So are new tensors of 16 bits without values, or
    with values that 16 bits hold exactly, such as a mask. Writes into an existing tensor, and random numbers, keep
    their dtype; an operator without a float64 version runs unchanged. With ``rounds_stored``, also of an
    outer call, float32 tensors that no operator has computed, such as weights, are still rounded where the code
    converts them to 16 bits. With ``widens_new`` new tensors in float32, such as ``torch.zeros`` or positions, are in
    float64 too, with the same values: a convolution with a bias refuses them beside weights in float64.
    Yields the dtypes of 16 bits that the operators reach, which are complete at the end.

    Raises the code's own errors if it requires a certain dtype.

    >>> with in_float64():
    ...     torch.ones(2, dtype=torch.bfloat16).div(3).dtype
    torch.float64
    """
    # An accelerator's backward pass would run in a separate thread, without the mode.
    before = getattr(_here, "rounds_stored", False)
    _here.rounds_stored = rounds_stored or before
    mode = _Float64Mode(widens_new)
    try:
        with torch.autograd.set_multithreading_enabled(False), mode:
            yield mode.coarse
    finally:
        _here.rounds_stored = before


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Suspend :func:`in_float64` for this thread, so that operators compute in the dtypes of their inputs."""
    before = getattr(_here, "off", False)
    _here.off = True
    try:
        yield
    finally:
        _here.off = before


class _Float64Mode(UntracedMode):
    def __init__(self, widens_new: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarse = CoarseDtypes()
        self._widens_new = widens_new

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(_here, "off", False):
            return func(*args, **kwargs)
        is_rounded = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in _COARSE
        # What operators have computed is in float64.
        if is_rounded and args[0].dtype == torch.float32 and getattr(_here, "rounds_stored", False):
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        if not returns_views(func):
            self.coarse.read.update(_coarse([*args, *kwargs.values()]))
            if func not in MOVES:
                self.coarse.left.update(_coarse([result]))
            if func.namespace != "aten" and func._schema.is_mutable:
                # It may round to what it reads, and write that into a wide tensor.
                self.coarse.left.update(_coarse([*args, *kwargs.values()]))
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if getattr(_here, "off", False) or func.namespace != "aten":
            return func(*args, **kwargs)
        schema = func._schema
        if schema.is_mutable:
            return func(*_fitting(args, written := _written(func, args, kwargs)), **_fitting(kwargs, written))
        # A gradient that autograd rounds to a weight's dtype must have that dtype.
        moves = func in MOVES or (func is torch.ops.aten._to_copy.default and is_backward())
        if returns_views(func) or moves or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        if _PACKED.search(schema.name) is None:
            dtypes = [each.dtype for each in tensors_in(args)]
            asked = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
            if _FLOATING.isdisjoint(dtypes):
                return _made(func, args, kwargs, self._widens_new)
            if _WIDE.keys().isdisjoint([*dtypes, *asked]):
                return func(*args, **kwargs)
            with contextlib.suppress(RuntimeError):  # no float64 version, as for some fused attention
                return func(*_wide(args), **_wide(kwargs))
        return func(*_fitting(args, narrow := _narrow(args)), **_fitting(kwargs, narrow))


MOVES = {torch.ops.aten.embedding.default}
"""Operators that compute nothing, and would copy much data."""
# The memory that these return is not read before something is written to it.
_WITHOUT_VALUES = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}
# Some of these misread float64 as a different dtype, without a check.
_PACKED = re.compile(r"pack|int[48]|quant|fbgemm|cslt|_scaled_(grouped_)?mm")


def _made(func: Any, args: Any, kwargs: Mapping[str, Any], widens_new: bool) -> Any:
    """The result of an operator that is given no floating-point numbers: in float64 if 16 bits would not round it, or
    with ``widens_new`` if it is in float32.
    """
    result = func(*args, **kwargs)
    takes_dtype = any(each.name == "dtype" for each in func._schema.arguments)
    # Sparse and meta tensors, and subclasses such as jagged ones, have no comparison of values.
    is_plain = type(result) is torch.Tensor and result.layout is torch.strided and not result.is_meta
    if widens_new and is_plain and result.dtype == torch.float32:
        # To make it in float64 would be another operator, and its values might be rounded differently.
        return result.to(torch.float64)
    if not (takes_dtype and is_plain and result.dtype in _COARSE):
        return result
    with contextlib.suppress(RuntimeError):  # no float64 version, or a nested tensor
        wide = func(*args, **{**kwargs, "dtype": torch.float64})
        if func in _WITHOUT_VALUES or torch.equal(wide, result.to(torch.float64)):
            return wide
    return result


def returns_views(func: Any) -> bool:
    """Whether an operator computes nothing, and shows a part of its argument."""
    schema = func._schema
    return not schema.is_mutable and any(each.alias_info is not None for each in schema.returns)


def _coarse(values: Sequence[Any]) -> set[str]:
    """The names of the tensors' dtypes of 16 bits."""
    return {_COARSE[each.dtype] for each in tensors_in(values) if each.dtype in _COARSE}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or the result of an operation."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)


def _narrow(args: Any) -> torch.dtype | None:
    """Return the first narrower dtype among the tensors; None if there are no floating-point tensors."""
    found = [each.dtype for each in tensors_in(args) if each.dtype in _FLOATING]
    return next((dtype for dtype in found if dtype in _WIDE), torch.float32 if found else None)


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE[value.dtype]) if value.dtype in _WIDE else value
    if isinstance(value, torch.dtype):
        return _WIDE.get(value, value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wide(each) for each in value)
    if isinstance(value, Mapping):
        return {key: _wide(each) for key, each in value.items()}
    return value


def written_tensors(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator writes into."""
    schema = func._schema
    given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(given.get(argument.name))


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the floating-point dtype of the arguments that an operator writes into; None if there is none."""
    found = written_tensors(func, args, kwargs)
    return next((each.dtype for each in found if each.dtype in _FLOATING), None)


def _fitting(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert real floating-point tensors to this dtype, because few operators write across dtypes."""
    if dtype is None or dtype.is_complex:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _FLOATING and not value.is_complex() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_fitting(each, dtype) for each in value)
    if isinstance(value, Mapping):
        return {key: _fitting(each, dtype) for key, each in value.items()}
    return value
