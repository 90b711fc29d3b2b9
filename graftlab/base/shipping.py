"""Serialize functions and values between the notebook and the ranks.

A function defined in a notebook cell travels by value, with the cell's source, so that a traceback on a rank shows the
cell's lines. An error names the part of a value that cannot be pickled.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import io
import logging
import operator
import pickle
import struct
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import cloudpickle
import torch

from graftlab.base.sources import install_source, source_of
from graftlab.base.tensor_bytes import buffer_of, from_bytes
from graftlab.errors import ShippingError, warn

logger = logging.getLogger(__name__)

# A captured value of this size is nearly always a mistake (a tensor or frame in a global), and every rank receives it.
LARGE = 16 << 20

_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PICKLED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4),
}

# Of the pickled value, at the end of what is sent.
_SIZE = struct.Struct("<Q")


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that also collects the sources of the notebook cells involved."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.sources: dict[str, str] = {}
        self.packed_before = 0
        """The bytes of what was pickled before."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Packed):
            self.packed_before += len(obj.packed)
        if isinstance(obj, types.FunctionType):
            filename = obj.__code__.co_filename
            source = source_of(filename)
            if source is not None:
                self.sources[filename] = source
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1.3 and later replace the file's name, by which tracebacks find the source.
            return _code_of_file, (obj.co_filename, *self.dispatch_table[types.CodeType](obj))
        if type(obj) is torch.Tensor and obj.dtype not in _PICKLED and obj.layout == torch.strided:
            # Of newer dtypes, such as float8, torch does not unpickle what it has pickled.
            bits = obj.detach().view(_OF_SIZE[obj.dtype.itemsize])
            return _in_dtype, (bits, obj.dtype, obj.requires_grad, vars(obj))
        return super().reducer_override(obj)


def _in_dtype(bits: torch.Tensor, dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]) -> torch.Tensor:
    made = bits.view(dtype).requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def _code_of_file(filename: str, make: Callable[..., types.CodeType], args: tuple[Any, ...]) -> types.CodeType:
    return make(*args).replace(co_filename=filename)


class _ResultPacker(_Packer):
    """Sends tensors as plain CPU tensors with only their own bytes, without the rest of a view's storage."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and _has_plain_bytes(obj):
            local = obj.to_local() if hasattr(obj, "to_local") else obj
            # Of a buffer pickle makes no copy on the way, and the other side gets one that it may write.
            return from_bytes, (pickle.PickleBuffer(buffer_of(local).data), local.dtype, tuple(local.shape))
        return super().reducer_override(obj)


def _has_plain_bytes(tensor: torch.Tensor) -> bool:
    # Quantized tensors have scales beside their bytes, and a view of them in another dtype ends the process.
    is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return is_plain and tensor.device.type != "meta"


class Packed:
    """A value that is already pickled. A rank receives the value itself, and no warning names its size."""

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    @classmethod
    def of(cls, value: Any) -> Any:
        """Pickle a value of the package's own, however large it is; to a rank the result is that value."""
        return cls(_pack(value, _Packer))

    def __reduce__(self) -> Any:
        return _unpack, (self.packed,)


class PackedCall:
    """A function bound to its arguments that was pickled for any number of runs. A rank receives it as a partial."""

    def __init__(self, function: Callable[..., Any], calls: Packed, index: int) -> None:
        self.__wrapped__ = function
        self._calls, self._index = calls, index

    def __call__(self) -> Any:
        return _unpack(self._calls.packed)[self._index]()

    def __reduce__(self) -> Any:
        return operator.getitem, (self._calls, self._index)


def _pack(value: Any, packer: type[_Packer]) -> bytes:
    return _pack_and_count(value, packer)[0]


def _pack_and_count(value: Any, packer: type[_Packer]) -> tuple[bytes, int]:
    """The pickled value, and how many of its bytes were pickled before."""
    buffer = io.BytesIO()
    pickler = packer(buffer)
    pickler.dump(value)
    size = buffer.tell()
    # After the value, which may be large: before it, it would have to be copied.
    buffer.write(pickle.dumps(pickler.sources, protocol=pickle.HIGHEST_PROTOCOL))
    buffer.write(_SIZE.pack(size))
    return buffer.getvalue(), pickler.packed_before


def _unpack(blob: bytes | memoryview) -> Any:
    whole = memoryview(blob)
    (size,) = _SIZE.unpack(whole[-_SIZE.size :])
    # Before the value is made, whose functions' sources these are.
    for filename, source in pickle.loads(whole[size : -_SIZE.size]).items():
        install_source(filename, source)
    return pickle.loads(whole[:size])


def pack_function(function: Callable[..., Any], what: str = "the function") -> bytes:
    """Pickle a function, by value if it is not importable.

    Raises :class:`ShippingError`, which names the part that cannot be pickled.
    """
    return _pack_or_name(function, _parts(function, what), what)


def unpack_function(blob: bytes) -> Callable[..., Any]:
    function: Callable[..., Any] = _unpack(blob)
    return function


def pack_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], what: str = "the function"
) -> bytes:
    """Pickle a function with its arguments. Raises :class:`ShippingError`, which names an unpicklable part."""
    return _pack_or_name((function, args, dict(kwargs)), [(what, function), *_arguments(args, kwargs)], what)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    parts = [(f"positional argument {index}", arg) for index, arg in enumerate(args)]
    return [*parts, *((f"argument {name!r}", arg) for name, arg in kwargs.items())]


def pack_together(
    functions: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[PackedCall]:
    """Pickle functions with the same arguments, once for any number of runs. On a rank they share what they share here.

    ``functions`` are by the names that errors give them. Raises :class:`ShippingError` as :func:`pack_call` does.
    """
    bound = [functools.partial(function, *args, **kwargs) for function in functions.values()]
    parts = [*functions.items(), *_arguments(args, kwargs)]
    calls = Packed(_pack_or_name(bound, parts, " and ".join(functions)))
    return [PackedCall(function, calls, index) for index, function in enumerate(functions.values())]


def unpack_call(blob: bytes) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    function, args, kwargs = _unpack(blob)
    return function, args, kwargs


def pack_result(value: Any) -> bytes:
    """Pickle a function's result on a rank; an unpicklable one becomes an :class:`UnshippedValue` with its repr."""
    try:
        return _pack(value, _ResultPacker)
    except Exception as error:
        return _pack(UnshippedValue(type(value).__qualname__, _repr(value), str(error)), _ResultPacker)


def _repr(value: Any) -> str:
    try:
        return repr(value)[:2000]
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raises {type(error).__name__}: {error}>"


def unpack_result(blob: bytes | memoryview) -> Any:
    try:
        return _unpack(blob)
    except Exception as error:
        return UnshippedValue("unknown", "<a value that cannot be loaded in the notebook>", str(error))


class UnshippedValue:
    """Placeholder for a value that stayed on its rank because it cannot be pickled; ``why`` is the reason."""

    def __init__(self, kind: str, text: str, why: str) -> None:
        self.kind, self.text, self.why = kind, text, why

    def __repr__(self) -> str:
        return self.text


def _pack_or_name(value: Any, parts: list[tuple[str, Any]], what: str) -> bytes:
    """Pickle a value, or raise an error that names the offending part of ``parts``; ``what`` names the whole value."""
    try:
        blob, packed_before = _pack_and_count(value, _Packer)
    except Exception as error:
        # cloudpickle turns a RecursionError into its own error.
        if deep := next((name for name, part in parts if _is_deep(part)), None):
            raise ShippingError(
                f"{deep} cannot be sent to the ranks: it nests deeper than pickle can follow. Flatten it, or create it "
                f"on the ranks instead"
            ) from error
        raise ShippingError(
            f"{_culprit(parts, {id(value)}) or what} cannot be sent to the ranks: {error}. Create it on the ranks "
            f"instead (in a %%graft cell, or inside the function), or pass the values that it is built from"
        ) from error
    # What was pickled before had its warning then.
    if len(blob) - packed_before > LARGE:
        biggest = _biggest(parts, len(blob), {id(value)})
        warn(
            f"{what} takes {len(blob) >> 20} MiB along to every rank{f', most of it in {biggest}' if biggest else ''}; "
            f"create large values on the ranks instead"
        )
    return blob


def _is_deep(value: Any) -> bool:
    """Whether lists, tuples and dicts nest deeper than Python's recursion limit."""
    level = _nested([value])
    seen: set[int] = set()  # a value that contains itself is not deep
    for _ in range(sys.getrecursionlimit()):
        inner = [_nested(each.values() if type(each) is dict else each) for each in level]
        level = list({id(part): part for parts in inner for part in parts if id(part) not in seen}.values())
        seen.update(map(id, level))
        if not level:
            return False
    return True


def _nested(values: Iterable[Any]) -> list[Any]:
    return [part for part in values if type(part) in (list, tuple, dict)]


def _culprit(parts: list[tuple[str, Any]], seen: set[int]) -> str | None:
    """Return the name of the innermost part that cannot be pickled."""
    for name, part in parts:
        if id(part) not in seen and _size(part) < 0:
            seen.add(id(part))
            return _culprit(_parts(part, name), seen) or name
    return None


def _biggest(parts: list[tuple[str, Any]], size: int, seen: set[int]) -> str | None:
    """Return the name of the innermost part that makes up more than half of the whole."""
    for name, part in parts:
        if id(part) not in seen and (own := _size(part)) > size // 2:
            seen.add(id(part))
            return _biggest(_parts(part, name), own, seen) or name
    return None


def _parts(value: Any, what: str) -> list[tuple[str, Any]]:
    """Return the parts that travel with a value, under the names from its source code."""
    if isinstance(value, types.FunctionType):
        return [(f"variable {name!r} used by {value.__name__}()", part) for name, part in _captured(value)]
    if isinstance(value, types.MethodType):
        return [(f"{what}.__self__", value.__self__), *_parts(value.__func__, what)]
    if isinstance(value, functools.partial):
        return [(what, value.func), *_parts(value.args, f"{what}.args"), *_parts(value.keywords, f"{what}.keywords")]
    if isinstance(value, Mapping):
        return [(f"{what}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"{what}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, type):
        return [(f"{value.__name__}.{name}", part) for name, part in vars(value).items()]
    attributes = [(f"{what}.{name}", part) for name, part in getattr(value, "__dict__", {}).items()]
    return [*attributes, (f"class {type(value).__name__}", type(value))]


def _captured(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals, closure variables and defaults that travel with a function, by name."""
    codes = [function.__code__]
    for code in codes:
        # A comprehension or an inner function is a constant of the code around it.
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval in function.__globals__:
                yield instruction.argval, function.__globals__[instruction.argval]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _size(value: Any) -> int:
    """Return the size of the pickled value in bytes; -1 if it cannot be pickled."""
    try:
        return len(_pack(value, _Packer))
    except Exception as error:
        logger.debug("not picklable: %s", error)
        return -1
