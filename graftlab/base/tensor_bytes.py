"""Tensors as bytes: to copy dtypes for which torch has no kernels, and to send a tensor without its class.

torch does not copy, select or compare numbers of fewer than eight bits, and supports few of the eight-bit floats. It
supports all of that for the bytes that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_BY_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _BY_NAME.values()}
"""The name of each dtype in ``torch``, which is used wherever a dtype is stored as text."""


def dtype_named(name: str) -> torch.dtype:
    """The inverse of :data:`DTYPE_NAMES`. Raises ValueError for a name that this torch does not know."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"torch has no dtype {name!r}") from None


def memory_of(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory, which its views share; None if it has none that could be compared.

    Sparse, empty and meta tensors have none, nor have those of ``torch.func``'s transforms.
    """
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory in a dtype that torch can copy, select and compare."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in row-major order as a flat tensor of bytes; a view if the tensor is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return copyable(plain).contiguous().view(-1).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements in row-major order as bytes, from any device."""
    return buffer_of(tensor).tobytes()


def buffer_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the elements in row-major order as an array of bytes; of a contiguous CPU tensor it is its own memory."""
    array: npt.NDArray[np.uint8] = as_bytes(tensor).to("cpu").as_subclass(torch.Tensor).numpy()
    return array


def from_bytes(data: bytes | bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Build a CPU tensor from its bytes. Raises RuntimeError if the data does not fit dtype and shape.

    A bytearray becomes the tensor's own memory.
    """
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu").view(shape)
    own = data if isinstance(data, bytearray) else bytearray(data)
    return torch.frombuffer(own, dtype=torch.uint8).view(dtype).view(shape)


def assembled(
    pieces: Sequence[memoryview],
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Build a tensor from pieces of its bytes; a view of a single piece if its alignment allows that.

    With ``into``, a flat tensor of ``nbytes`` bytes, the result is a view of it. Raises ValueError or RuntimeError if
    the data does not fit dtype and shape.
    """
    came = sum(map(len, pieces))
    if came != nbytes:
        raise ValueError(f"received {came} of {nbytes} bytes")
    if not nbytes:
        return torch.empty(0, dtype=dtype, device="cpu").view(shape)
    flat = torch.frombuffer(pieces[0], dtype=torch.uint8)
    if into is not None or len(pieces) > 1 or flat.data_ptr() % 16:
        flat = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if into is None else into
        start = 0
        for piece in pieces:
            flat[start : start + len(piece)] = torch.frombuffer(piece, dtype=torch.uint8)
            start += len(piece)
    return flat.view(dtype).view(shape)


def real_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor's real and imaginary parts in a last dimension; any other tensor unchanged.

    A conversion to a real dtype would drop the imaginary parts.
    """
    return torch.view_as_real(tensor.resolve_conj().resolve_neg()) if tensor.is_complex() else tensor
