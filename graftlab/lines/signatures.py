"""An operation of torch in words: its schema's facts, and one call of it with dtypes and shapes for tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from graftlab.base.tensor_bytes import DTYPE_NAMES

# A collective's schema does not show what it writes to. It may still be in progress when it returns.
_COLLECTIVES = frozenset({"c10d"})
_FUNCTIONAL_COLLECTIVES = frozenset({"_c10d_functional"})
# In training these write to running statistics, which their schemas do not show.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = ("running_mean", "running_var")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape; of a nested one, which has no numbers for it, that of all its elements."""
    return (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)


class _TensorKind(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class _PlainValue(NamedTuple):
    # One of them equals True.
    kind: type
    value: Any


_Described: TypeAlias = "_TensorKind | _PlainValue | tuple[_Described, ...]"
"""An argument's value without its tensors."""


def _described(value: Any) -> _Described:
    if isinstance(value, torch.Tensor):
        return _TensorKind(DTYPE_NAMES[value.dtype], shape_of(value))
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    # Others, such as a collective's process group, cannot be hashed, and are not written out.
    return _PlainValue(type(value), value if isinstance(value, _WRITTEN) else None)


_WRITTEN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Argument(NamedTuple):
    """An argument in a schema. ``default`` is empty if it has none."""

    name: str
    is_by_name: bool
    is_written: bool
    default: tuple[_Described, ...]


class Signature(NamedTuple):
    """The facts of an operation that are known before it is called."""

    name: str
    arguments: tuple[_Argument, ...]
    is_collective: bool
    """Whether it may still be in progress when it returns, and its schema does not show what it writes to."""
    has_later_result: bool
    may_draw: bool

    def given(self, args: Sequence[Any], by_name: Mapping[str, Any]) -> list[tuple[_Argument, Any]]:
        """The arguments with the given values."""
        found = list(zip(self.arguments, args, strict=False))
        if by_name:
            left = self.arguments[len(args) :]
            found += [(argument, by_name[argument.name]) for argument in left if argument.name in by_name]
        return found

    def draws(self, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
        """Whether the operation draws random numbers in a call. Attention without dropout does not."""
        values = {argument.name: value for argument, value in self.given(args, given)}
        drops_out = any(argument.name == "dropout_p" for argument in self.arguments)
        return self.may_draw and (not drops_out or bool(values.get("dropout_p")))


@lru_cache(maxsize=4096)
def signature_of(func: Any) -> Signature:
    # torch makes each part of a schema anew at each access.
    schema = func._schema
    name = schema.name.rpartition("::")[2].removeprefix("_")
    is_collective = func.namespace in _COLLECTIVES
    arguments = [
        _Argument(
            each.name,
            each.kwarg_only,
            is_collective
            or (each.alias_info is not None and each.alias_info.is_write)
            or (name in _BATCH_NORMS and each.name in _STATISTICS),
            (_described(each.default_value),) if each.has_default_value() else (),
        )
        for each in schema.arguments
    ]
    has_later_result = func.namespace in _COLLECTIVES | _FUNCTIONAL_COLLECTIVES and name != "wait_tensor"
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return Signature(name, tuple(arguments), is_collective, has_later_result, draws)


_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}
_MOST_NUMBERS = 6


_Words = tuple[str, tuple[str, ...], tuple[tuple[int, ...], ...]]


def in_words(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> _Words:
    """An operation written as a call, with dtypes and shapes for tensors: ``mul(f32[2, 4], 0.1581)``.

    Also returns its arguments that are not tensors, and the shapes of its tensors.
    """
    described = tuple((name, _described(value)) for name, value in given.items())
    return _words(func, tuple(map(_described, args)), described)


# A slice without an end has this one.
_TO_THE_END = 2**63 - 1


# Layers repeat each other's operations.
@lru_cache(maxsize=4096)
def _words(func: Any, args: tuple[_Described, ...], given: tuple[tuple[str, _Described], ...]) -> _Words:
    signature = signature_of(func)
    words = []
    plain = []
    shapes: list[tuple[int, ...]] = []
    for argument, value in signature.given(args, dict(given)):
        kinds = [*_kinds(value)]
        shapes += [each.shape for each in kinds]
        if value == _described(None) or value in argument.default:
            continue
        shown = _value_in_words(value)
        named = isinstance(value, _PlainValue) and isinstance(value.value, (bool, str))
        by_name = argument.is_by_name or named or argument.name in ("scale", "eps", "dim")
        words.append(f"{argument.name}={shown}" if by_name and not isinstance(value, _TensorKind) else shown)
        if not kinds:
            plain.append(f"{argument.name}={shown}")
    return f"{signature.name}({', '.join(words)})", tuple(plain), tuple(shapes)


def _kinds(value: _Described) -> Iterator[_TensorKind]:
    if isinstance(value, _TensorKind):
        yield value
    elif not isinstance(value, _PlainValue):
        for each in value:
            yield from _kinds(each)


def _value_in_words(described: _Described) -> str:
    if isinstance(described, _TensorKind):
        return f"{_SHORT.get(described.dtype, described.dtype)}{list(described.shape)}"
    if not isinstance(described, _PlainValue):
        shown = [_value_in_words(each) for each in described[:_MOST_NUMBERS]]
        return f"[{', '.join(shown)}{', ...' if len(described) > _MOST_NUMBERS else ''}]"
    value = described.value
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, (torch.dtype, torch.device, torch.memory_format, torch.layout)):
        return str(value).removeprefix("torch.")
    if value == _TO_THE_END:
        return "end"
    return repr(value) if isinstance(value, (bool, int, str)) else type(value).__name__
