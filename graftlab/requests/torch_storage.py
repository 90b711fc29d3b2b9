"""A tensor's storage as plain pickle writes it, read without torch.load.

Plain pickle puts a storage into a file as the bytes of a torch.save in its old format: five small pickles, then the
numbers. The newer format is a zip archive, which may be packed, and is never written there.
"""

from __future__ import annotations

import io
import pickletools
import struct
from typing import Any

_COUNT = struct.Struct("<q")
_DTYPES = {
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
# Bookkeeping of a pickle, which is not part of what it says.
_SILENT = frozenset({"PROTO", "FRAME", "MARK", "STOP", "NONE", "TUPLE", "BINPERSID", "EMPTY_LIST", "APPEND"})
_SILENT |= {"BINPUT", "LONG_BINPUT", "MEMOIZE"}


def storage_of(data: bytes) -> Any:
    """A CPU storage with its dtype. Raises ValueError for what torch did not write as a single storage."""
    import torch

    file = io.BytesIO(data)
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
    (written,) = _COUNT.unpack(file.read(_COUNT.size))
    dtype = getattr(torch, _DTYPES[name])
    numbers = bytearray(file.read())
    if not written == count == len(numbers) // dtype.itemsize or len(numbers) % dtype.itemsize:
        raise ValueError("not the number of elements that was announced")
    flat = torch.frombuffer(numbers, dtype=torch.uint8).view(dtype) if numbers else torch.empty(0, dtype=dtype)
    return flat._typed_storage()  # type: ignore[no-untyped-call]


def _constants(file: io.BytesIO) -> list[Any]:
    """What the next pickle says, one by one. Raises ValueError where it does more than say something."""
    found = []
    for opcode, argument, _ in pickletools.genops(file):
        if opcode.name in _SILENT:
            continue
        if argument is None or not (opcode.name == "GLOBAL" or opcode.stack_before == []):
            raise ValueError(f"{opcode.name} was not expected")
        found.append(argument)
    return found
