"""Tensors of every dtype and layout, and how to compare them to the last bit."""

from __future__ import annotations

import re

import torch

_ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
# A quantized tensor is numbers with a scale and a zero point; taps skip those.
DTYPES = [dtype for dtype in _ALL if not str(dtype).startswith(("torch.qint", "torch.quint"))]
# torch cannot even copy numbers of fewer than eight bits, nor, up to 2.9, pairs of four; they exist as a view of bytes.
_NOT_COPYABLE = r"torch\.(u?int[1-7]" + (r"|float4\w*" if torch.__version__ < "2.10" else "") + ")"
COPYABLE = [dtype for dtype in DTYPES if not re.fullmatch(_NOT_COPYABLE, str(dtype))]


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 7) -> torch.Tensor:
    """Every pattern of bits, so NaNs with all payloads and both signs too; bool has two only."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in order, whatever the strides are, without a kernel for the dtype."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    unit = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[tensor.dtype.itemsize]
    same = tensor.view(unit) if tensor.dim() else tensor.view(1).view(unit)
    if unit is torch.complex128:
        same = torch.view_as_real(same).view(torch.int64)
    return same.contiguous().view(-1).view(torch.uint8)


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Views of one matrix: each of them new, so that a test may write into it."""
    matrix = random_bits(dtype, 64, 48)
    return {
        "contiguous": matrix,
        "0-d": matrix[3, 5],
        "empty": matrix[:0],
        "empty in the middle": matrix.view(64, 48, 1)[:, :0],
        "transposed": matrix.t(),
        "sliced": matrix[1::3, 5:40:2],
        "a row with an offset": matrix[7],
        "permuted": matrix.view(4, 16, 6, 8).permute(2, 0, 3, 1),
        "expanded": matrix[:, :1].expand(64, 9),
        "expanded 0-d": matrix[0, 0].expand(3, 4),
        "overlapping": matrix.view(-1).as_strided((5, 4), (2, 1)),
    }


# The layouts in which each number stands in one place only.
PLAIN_LAYOUTS = ("contiguous", "0-d", "empty", "empty in the middle", "transposed", "sliced", "permuted")
