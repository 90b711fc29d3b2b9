"""Tensors as bytes: to copy dtypes that torch has no kernels for, and to carry a tensor without its class.

torch copies, selects and compares no numbers of fewer than eight bits, and few of the eight-bit floats; it does all of
that with the bytes that hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BY_NAME = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _BY_NAME.values()}
"""How each dtype is called in ``torch``, and wherever a dtype is written down."""


def dtype_named(name: str) -> torch.dtype:
    """The inverse of :data:`DTYPE_NAMES`. Raises ValueError for a name that this torch does not have."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"torch has no dtype {name!r}") from None


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can copy, select and compare."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements row by row as a flat tensor of bytes; a view where the tensor lies like that in memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return copyable(plain).contiguous().view(-1).view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """The elements row by row, from whatever device."""
    return as_bytes(tensor).to("cpu").as_subclass(torch.Tensor).numpy().tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose elements these are, on the CPU. Raises RuntimeError where the three do not fit together."""
    if not data:
        return torch.empty(0, dtype=dtype, device="cpu").view(shape)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


def assembled(
    pieces: Sequence[memoryview],
    nbytes: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tensor whose elements are in these pieces; a window into the only one, where it lies as the dtype needs it.

    With ``into``, so many flat bytes, it is a window into those. Raises ValueError or RuntimeError where they do not
    fit together.
    """
    came = sum(map(len, pieces))
    if came != nbytes:
        raise ValueError(f"{came} bytes came of {nbytes}")
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
