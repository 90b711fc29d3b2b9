"""Rebuild the objects that a file of requests may name: builtin data, tensors, arrays and the kit's own requests.

Every function here accepts arbitrary content of a file; whatever does not fit becomes an :class:`Opaque`.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import math
import pickletools
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

from graftlab.requests.pickling import tensor_from_bytes
from graftlab.requests.records import Opaque, RecordedRequest
from graftlab.requests.served import FinishedRequest, Request

logger = logging.getLogger(__name__)

# Types that may be part of the data themselves, as in {"dtype": float}.
_TYPES = {
    f"builtins.{kind.__name__}": kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, slice)
}
_VALUES = {"builtins.Ellipsis": Ellipsis, "builtins.NotImplemented": NotImplemented}
# As Python 2 and the protocols before 3 write them.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "numpy.core.multiarray": "numpy._core.multiarray"}
_OLD_MODULES |= {"numpy.core.numeric": "numpy._core.numeric", "exceptions": "builtins"}
_OLD_NAMES = {"builtins.xrange": "builtins.range", "builtins.unicode": "builtins.str", "builtins.long": "builtins.int"}

# Files written before these classes moved.
_OLD_MODULES["graftlab.engine.request"] = "graftlab.requests.served"
_OLD_NAMES["graftlab.requests.served.Finished"] = "graftlab.requests.served.FinishedRequest"

# The dataclasses of the kit that a file may hold: only these, so that the result does not depend on the
# other imports of the process.
_OWN = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (Opaque, Request, FinishedRequest)}

# An expanded tensor has more elements than its file has numbers; with at most this number, a copy fits in memory.
_LARGEST_VIEW = 1 << 24

_STORAGE_COUNT = struct.Struct("<q")
_STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
# Opcodes of a pickle that carry no content.
_BOOKKEEPING = frozenset({"PROTO", "FRAME", "MARK", "STOP", "NONE", "TUPLE", "BINPERSID", "EMPTY_LIST", "APPEND"})
_BOOKKEEPING |= {"BINPUT", "LONG_BINPUT", "MEMOIZE"}

# Marks an Opaque that the file itself holds and whose state follows; others stand for foreign objects of the file.
_YET_TO_COME = "an Opaque without its state"


class _PendingArray:
    """A numpy array whose shape and contents come later."""


def named(module: str, name: str) -> Any:
    """Return the stand-in for a class, a function or another global of this name."""
    module = _OLD_MODULES.get(module, module)
    full = f"{module}.{name}"
    full = _OLD_NAMES.get(full, full)
    if full in _TYPES:
        return _TYPES[full]
    if full in _VALUES:
        return _VALUES[full]
    if module == "torch" and (dtype := _torch_dtype(name)) is not None:
        return dtype
    return _OWN.get(full) or Opaque(full)


def call(function: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of a global's call, if known, without calling it."""
    name = _name(function)
    maker = _MAKERS.get(name)
    if maker is not None:
        try:
            return maker(*args)
        except Exception as error:
            # The arguments are of another version, or forged.
            logger.debug("%s with arguments that were not expected: %s", name, error)
    return Opaque(name, tuple(args))


def new(kind: Any, args: Sequence[Any]) -> Any:
    """Make an object of a class, without its state."""
    if kind is Opaque and not args:
        return Opaque(_YET_TO_COME)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and not args:
        return object.__new__(kind)
    return call(kind, tuple(args))


def waits_for_state(value: Any) -> bool:
    """Whether :func:`with_state` will return a different object."""
    return isinstance(value, _PendingArray) or _is_numpy_dtype(value)


def with_state(value: Any, state: Any) -> Any:
    """Return the object with its state, the same one if it is mutable. Raises TypeError if it takes no state."""
    if isinstance(value, Opaque):
        if value.class_name is _YET_TO_COME:
            _fill_opaque(value, state)
        else:
            value.state = state
        return value
    if isinstance(value, _PendingArray):
        return _or_opaque(_array_of_state, state, "numpy.ndarray")
    if _is_numpy_dtype(value):
        return _or_opaque(functools.partial(_dtype_of_state, value), state, "numpy.dtype")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        _fill(value, state)
        return value
    raise TypeError(f"a {type(value).__name__} has no state")


def _or_opaque(make: Callable[[Any], Any], state: Any, name: str) -> Any:
    try:
        return make(state)
    except Exception as error:
        logger.debug("%s with a state that was not expected: %s", name, error)
        return Opaque(name, (), state)


def _name(function: Any) -> str:
    if isinstance(function, Opaque):
        return function.class_name if function.args is None else f"{function.class_name}(...)"
    if isinstance(function, type):
        return f"{function.__module__}.{function.__qualname__}"
    return f"an object of {type(function).__module__}.{type(function).__qualname__}"


# ---- builtin data ----------------------------------------------------------------------------------------------------


def _collection(kind: Callable[[Sequence[Any]], Any]) -> Callable[..., Any]:
    def make(items: Sequence[Any] = ()) -> Any:
        # A range, say, could stand for more items than there is memory.
        return kind(_expect(items, list, tuple))

    return make


def _bytearray(data: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(data.encode("latin-1")) if isinstance(data, str) else bytearray(_expect(data, bytes))


def _bytes(text: str = "", encoding: str = "latin1") -> bytes:
    """Protocols before 3 have no bytes: Python writes them as latin-1 text and the call that encodes it."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(encoding)
    return str.encode(_expect(text, str), "latin-1")


def _range(*numbers: int) -> range:
    return range(*(_expect(number, int) for number in numbers))


def _complex(real: float, imag: float) -> complex:
    return complex(_expect(real, float, int), _expect(imag, float, int))


def _object_of(kind: Any, base: Any, state: Any) -> Any:
    if base is tuple:
        return new(kind, _expect(state, tuple))
    return new(kind, () if state is None else (state,))


def _object_with_names(kind: Any, args: Sequence[Any], names: Any) -> Any:
    return new(kind, (*args, names) if names else args)


def _expect(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} was not expected")
    return value


# ---- the kit's own dataclasses ---------------------------------------------------------------------------------------


def _fill(value: Any, state: Any) -> None:
    """Set the fields as unpickling would, but without code of the class."""
    names = [field.name for field in dataclasses.fields(value)]
    if isinstance(state, list):  # of frozen dataclasses with slots
        state = dict(zip(names, state, strict=True))
    if isinstance(state, tuple):  # of other classes with slots
        state = {name: item for part in state if part is not None for name, item in part.items()}
    for name, item in _expect(state, dict).items():
        if hasattr(value, "__dict__"):
            vars(value)[_expect(name, str)] = item
        elif name in names:
            object.__setattr__(value, name, item)


def _fill_opaque(value: Opaque, state: Any) -> None:
    value.class_name = _expect(state["class_name"], str)
    value.args = state["args"] if state["args"] is None else _expect(state["args"], tuple)
    value.state = state["state"]
    value.items = _expect(state["items"], list)


# ---- numpy -----------------------------------------------------------------------------------------------------------


def _is_numpy_dtype(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def _numpy_dtype(text: str, align: Any = False, copy: Any = True) -> Any:
    import numpy

    return numpy.dtype(_expect(text, str))


def _dtype_of_state(dtype: Any, state: tuple[Any, ...]) -> Any:
    """Return the dtype with the byte order, unit or fields of its state."""
    import numpy

    _, order, subdtype, names, fields, itemsize, *_ = state
    if subdtype is not None or order not in ("<", ">", "|", "="):
        raise ValueError("an array as an element")
    if names is not None:
        formats = [fields[name][0] for name in names]
        if not all(_is_numpy_dtype(kind) and not kind.hasobject for kind in formats):
            raise ValueError("fields that are not numbers")
        offsets = [_expect(fields[name][1], int) for name in names]
        return numpy.dtype({"names": list(names), "formats": formats, "offsets": offsets, "itemsize": itemsize})
    if dtype.kind in "mM":
        unit, count = state[8][1][:2]
        unit = unit.decode("ascii") if isinstance(unit, bytes) else _expect(unit, str)
        dtype = numpy.dtype(dtype.kind + "8" if unit == "generic" else f"{dtype.kind}8[{_expect(count, int)}{unit}]")
    elif dtype.kind in "SUV" and itemsize >= 0:
        dtype = numpy.dtype(f"{dtype.kind}{_expect(itemsize, int) // (4 if dtype.kind == 'U' else 1)}")
    return dtype if order == "|" else dtype.newbyteorder(order)


def _empty_array(kind: Any, shape: Any, typecode: Any) -> _PendingArray:
    if not isinstance(kind, Opaque) or kind.class_name != "numpy.ndarray":
        raise TypeError("a subclass of numpy.ndarray")
    return _PendingArray()


def _array_of_state(state: tuple[Any, ...]) -> Any:
    import numpy

    _, shape, dtype, fortran, data = state
    order: Literal["F", "C"] = "F" if fortran else "C"
    if dtype == numpy.dtype(object):
        flat = numpy.empty(len(_expect(data, list)), dtype=object)
        for index, item in enumerate(data):
            flat[index] = item
        # Objects are listed in C order, whatever the order of the array was.
        return flat.reshape(shape)
    return _array(data, dtype, shape, order)


def _array(data: bytes | bytearray, dtype: Any, shape: tuple[int, ...], order: str = "C") -> Any:
    import numpy

    _expect(data, bytes, bytearray)
    if not _is_numpy_dtype(dtype) or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("bytes, dtype and shape contradict each other")
    return numpy.ndarray(shape, dtype, bytearray(data), order="F" if order == "F" else "C")


def _scalar(dtype: Any, data: bytes) -> Any:
    return _array(data, dtype, ())[()]


# ---- torch -----------------------------------------------------------------------------------------------------------


def _torch_dtype(name: str) -> Any:
    import torch

    found = vars(torch).get(name)
    return found if isinstance(found, torch.dtype) else None


def _torch_device(*args: Any) -> Any:
    import torch

    return torch.device(*(_expect(arg, str, int) for arg in args))


def _torch_size(shape: tuple[int, ...] = ()) -> Any:
    import torch

    return torch.Size(_expect(number, int) for number in shape)


def _torch_storage(data: bytes) -> Any:
    """A CPU storage with its dtype, from the bytes of a torch.save in its old format, read without torch.load.

    Plain pickle writes a tensor's storage that way: five small pickles, then the numbers. It never writes the newer
    format, a zip archive, which may be compressed. Raises ValueError for anything that torch did not write as a single
    storage.
    """
    import torch

    file = io.BytesIO(_expect(data, bytes))
    for _ in range(3):  # a magic number, the version, and facts of the machine
        for _ in pickletools.genops(file):
            pass
    parts = _constants(file)
    if len(parts) != 5 or parts[0] != "storage":
        raise ValueError("not one storage")
    _, kind, key, _, count = parts
    name = str(kind).removeprefix("torch ").removesuffix("Storage")
    if _constants(file) != [key]:
        raise ValueError("not the storage that was announced")
    (written,) = _STORAGE_COUNT.unpack(file.read(_STORAGE_COUNT.size))
    dtype = getattr(torch, _STORAGE_DTYPES[name])
    numbers = bytearray(file.read())
    if not written == count == len(numbers) // dtype.itemsize or len(numbers) % dtype.itemsize:
        raise ValueError("not the number of elements that was announced")
    flat = (
        torch.frombuffer(numbers, dtype=torch.uint8).view(dtype)
        if numbers
        else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat._typed_storage()  # type: ignore[no-untyped-call]


def _constants(file: io.BytesIO) -> list[Any]:
    """Return the constants of the next pickle. Raises ValueError if it has any other opcode."""
    found = []
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in _BOOKKEEPING:
            continue
        if argument is None or not (opcode.name == "GLOBAL" or opcode.stack_before == []):
            raise ValueError(f"{opcode.name} was not expected")
        found.append(argument)
    return found


def _tensor(storage: Any, offset: int, size: Any, stride: Any, requires_grad: Any, hooks: Any, more: Any = None) -> Any:
    import torch

    if not isinstance(storage, torch.TypedStorage) or more:
        raise TypeError("another kind of storage, or a lazy conjugate or negative")
    flat = torch.empty(0, dtype=storage.dtype, device="cpu").set_(storage)
    if math.prod(_expect(number, int) for number in size) > max(_LARGEST_VIEW, flat.numel()):
        raise ValueError("a tensor that shows one number many times")
    # as_strided refuses a view beyond the storage.
    return flat.as_strided(size, stride, offset)


def _parameter(data: Any, requires_grad: Any, hooks: Any) -> Any:
    import torch

    return _expect(data, torch.Tensor)


_MAKERS: dict[str, Callable[..., Any]] = {
    "builtins.set": _collection(set),
    "builtins.frozenset": _collection(frozenset),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.range": _range,
    "builtins.slice": slice,
    "_codecs.encode": _bytes,
    "copyreg._reconstructor": _object_of,
    "copyreg.__newobj__": lambda kind, *args: new(kind, args),
    "copyreg.__newobj_ex__": _object_with_names,
    "graftlab.requests.records.RecordedRequest": RecordedRequest,
    "graftlab.requests.pickling.tensor_from_bytes": tensor_from_bytes,
    "numpy.dtype": _numpy_dtype,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy._core.numeric._frombuffer": _array,
    "torch.Size": _torch_size,
    "torch.device": _torch_device,
    "torch.storage._load_from_bytes": _torch_storage,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
}
